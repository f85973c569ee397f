"""What operators see over HTTP: metrics, and a page of three files that needs no other host."""
