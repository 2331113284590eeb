"""Who may come in: rates, budgets, room in the queue."""
