// Texts of agents, made visible. They may hold characters that turn the reading direction, hide, or break lines: each
// of them is shown as a mark. The texts become text nodes, so they are never markup.
const NAMED = { "\t": "⇥", "\n": "⏎", "\r": "␍" };
// Control characters, soft hyphens, marks of direction, zero width, separators, invisible operators, tags, halves of pairs.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Surrogate}/gu;

export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (character) => {
    if (NAMED[character]) return NAMED[character];
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

// The same for a text of several lines: line ends and tabs are what they are.
export function visibleLines(text) {
  return String(text ?? "").split(/([\n\t])/).map((part) => (part === "\n" || part === "\t" ? part : visible(part))).join("");
}

// The same for a token: one of spaces alone would be no more than a gap.
export function visibleToken(text) {
  return /^ +$/.test(text) ? "␣".repeat(text.length) : visible(text);
}

// Metadata and sampling, as JSON in a few lines.
export function visibleJson(value) {
  return JSON.stringify(value, null, 1).split("\n").map(visible).join("\n");
}
