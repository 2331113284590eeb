"""The model: forward passes over packed rows, the DeepSpeed engine around it, its optimizer and its files."""
