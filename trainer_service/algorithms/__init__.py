"""The arithmetic of learning: rewards to advantages, advantages to losses. Pure functions of tensors."""
