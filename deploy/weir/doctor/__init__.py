"""`weir doctor`: says in sentences what is wrong with a deployment. It only reads."""
