"""Results that others can repeat: experiments on the real stack, with their figures in `data`.

experiments/  what is asked, and which runs answer it      environments/  the tasks that are not a library's
trial.py      one run                                      trl/           the same task with TRL
report.py     data/*.json ─▶ README.md and the pictures
"""
