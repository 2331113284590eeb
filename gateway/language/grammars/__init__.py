"""The grammars of answers as an engine gets them, and what they cost its compiler."""
