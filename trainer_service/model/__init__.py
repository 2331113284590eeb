"""The model: its forward passes over packed rows, its DeepSpeed engine, its optimizer and its files."""
