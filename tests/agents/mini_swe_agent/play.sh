# The commands of a user who runs mini-swe-agent. Base URL and key come from the environment.
set -eu

solve() {
  mini -t "$QUESTION" -y -m openai/gpt-4o --exit-immediately -o trajectory.json > log.txt 2>&1 || { cat log.txt; exit 1; }
  python -c 'import json; print(json.dumps(json.load(open("trajectory.json"))["info"]))'
}

"$1"
