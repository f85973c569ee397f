"""What runs a model by its own code over the paged cache: what its layers need is read from it, its
attention, experts and products are ours."""
