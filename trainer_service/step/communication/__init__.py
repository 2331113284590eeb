"""How the ranks of a trainer find each other, speak to each other, and notice that one is gone."""
