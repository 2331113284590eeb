"""How the model and its work are distributed over ranks."""
