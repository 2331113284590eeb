"""The checks of `weir doctor`: each is one function that yields the problems it finds in the facts."""
