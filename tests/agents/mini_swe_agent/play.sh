# What somebody types who uses mini-swe-agent. Base URL and key come from the environment.
set -eu

mini -t "$QUESTION" -y -m openai/policy --exit-immediately -o trajectory.json > log.txt 2>&1 || { cat log.txt; exit 1; }
tail -1 trajectory.json
