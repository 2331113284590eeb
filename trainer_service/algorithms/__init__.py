"""The arithmetic of learning: rewards to advantages, advantages to losses. Values in, values out."""
