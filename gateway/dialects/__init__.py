"""The public wire shapes, each read into the same inner call and told back."""
