"""What only a GPU needs: recorded forward passes, and transfers that the host does not wait for."""
