"""Triton kernels of a GPU: `attention` over a paged cache and the operations of `layers`. Either is
imported where it runs, for elsewhere there may be no Triton."""
