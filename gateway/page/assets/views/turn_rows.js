// The rows of a session's turns: a turn that does not extend its parent begins another one.

// [{turn, at, parent, row}] in the session's order; `parent` is the place of the parent turn, or null.
export function rowsOf(turns) {
  const places = new Map(turns.map((turn, i) => [turn.turn_id, i]));
  const rows = [];
  let used = 0;
  turns.forEach((turn, at) => {
    const parent = places.get(turn.parent_id) ?? null;
    const row = turn.relation === "extends" && parent !== null && rows[parent] ? rows[parent].row : used++;
    rows.push({ turn, at, parent, row });
  });
  return rows;
}

// The row with most turns, the first of several.
export function mainRow(rows) {
  const counts = new Map();
  for (const { row } of rows) counts.set(row, (counts.get(row) ?? 0) + 1);
  return [...counts].reduce((best, each) => (each[1] > best[1] ? each : best), [0, 0])[0];
}

// The turns from the root to the last turn of a row.
export function branchOf(rows, row) {
  const branch = [];
  let at = rows.findLastIndex((each) => each.row === row);
  while (at !== null && at >= 0 && !branch.includes(rows[at])) {
    branch.unshift(rows[at]);
    at = rows[at].parent;
  }
  return branch;
}
