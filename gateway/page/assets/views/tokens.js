// The token view: the tokens of one turn, some thousand at a time, coloured by a scale. Arrow keys go from token to
// token; the numbers of the one that is pointed at, or reached by keys, are in the line above the text.
import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { useGet } from "../api.js";
import { number } from "../format.js";
import { ErrorNote, Loading } from "../parts.js";
import { numbersOf, scaleOf } from "./scales.js";
import { visible, visibleToken } from "./visible.js";

export const TOKENS_AT_ONCE = 2000;

// `turn` is the turn of `GET /sessions/{id}`; `start` the first token that is shown; `onStart(start)` shows others.
export function Tokens({ sessionId, turn, colour, start, onStart, label }) {
  const end = Math.min(start + TOKENS_AT_ONCE, turn.context_len + turn.output_len);
  const asked = new URLSearchParams({ tokens: true, token_texts: true, turn_id: turn.turn_id, token_start: start, token_end: end });
  const { data, error, loading, reload } = useGet(`/sessions/${encodeURIComponent(sessionId)}?${asked}`);
  const tokens = useMemo(() => (data ? tokensOf(data.turns[0]) : []), [data]);
  const scale = useMemo(() => scaleOf(colour, tokens), [colour, tokens]);
  if (error) return html`<${ErrorNote} error=${error} again=${reload} />`;
  if (loading && !data) return html`<${Loading} />`;
  return html`<div class="token-view">
    <${Pager} turn=${turn} start=${start} end=${end} onStart=${onStart} />
    <${Legend} scale=${scale} tokens=${tokens} />
    <${Text} tokens=${tokens} scale=${scale} label=${label} />
  </div>`;
}

// The tokens of a reply: {at, id, text, sampled, logprob, version, advantage, ratio, why}. A token without a text of its
// own belongs to the character before it.
function tokensOf(turn) {
  const first = turn.window?.start ?? 0;
  const context = turn.context_ids.length;
  const base = first < turn.context_len ? 0 : first - turn.context_len;
  const ids = [...turn.context_ids, ...turn.output_ids];
  const texts = [...turn.context_token_texts, ...turn.output_token_texts];
  const spanOf = (spans, at) => spans.find((each) => each.start <= at && at < each.end);
  return ids.map((id, i) => {
    const at = first + i;
    const sampled = i >= context;
    const out = sampled ? base + i - context : 0; // its place among the output tokens
    return {
      at,
      id,
      text: texts[i],
      sampled,
      logprob: sampled ? turn.logprobs[i - context] : null,
      version: sampled ? (spanOf(turn.versions, out)?.version ?? null) : null,
      advantage: sampled ? (turn.training?.advantages?.[i - context] ?? null) : null,
      ratio: sampled ? (turn.training?.ratios?.[i - context] ?? null) : null,
      why: spanOf(turn.untrained, at)?.why ?? null,
    };
  });
}

function Pager({ turn, start, end, onStart }) {
  const all = turn.context_len + turn.output_len;
  return html`<div class="pager">
    <span>Tokens ${number(start)} to ${number(end)} of ${number(all)}: ${number(turn.context_len)} of context, ${number(turn.output_len)} sampled</span>
    <span class="buttons">
      <button class="small" disabled=${start === 0} onClick=${() => onStart(Math.max(0, start - TOKENS_AT_ONCE))}>Earlier tokens</button>
      <button class="small" disabled=${end >= all} onClick=${() => onStart(end)}>Later tokens</button>
      ${turn.context_len > 0 && html`<button class="small" onClick=${() => onStart(0)}>Context</button>`}
      ${turn.context_len > 0 && html`<button class="small" onClick=${() => onStart(outputStart(turn))}>Sampled</button>`}
    </span>
  </div>`;
}

// Where the view of a turn begins: a little before what was sampled.
export function outputStart(turn) {
  return Math.max(0, turn.context_len - 40);
}

function Legend({ scale, tokens }) {
  const counts = scale.classes.map((_, i) => tokens.reduce((sum, each) => sum + (scale.of(each) === i), 0));
  const shown = scale.classes.map((each, i) => ({ ...each, count: counts[i] })).filter((each) => each.count);
  return html`<div class="legend">
    <p class="muted">${scale.note}${shown.length ? "" : " None of these tokens has a value."}</p>
    <ul>
      ${shown.map((each) => html`<li><span class=${`tok ${each.mark}`} aria-hidden="true">abc</span> ${visible(each.label)} <span class="muted">(${number(each.count)})</span></li>`)}
    </ul>
  </div>`;
}

function Text({ tokens, scale, label }) {
  const [current, setCurrent] = useState(0);
  const box = useRef(null);
  useEffect(() => setCurrent(firstSampled(tokens)), [tokens]);
  const shown = Math.min(current, tokens.length - 1);
  const over = (event) => {
    const place = event.target.closest("[data-i]")?.dataset.i;
    if (place !== undefined) setCurrent(Number(place));
  };
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, shown + by));
    setCurrent(next);
    box.current.querySelector(`[data-i="${next}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const words = useMemo(() => tokens.map((token, i) => word(token, i, scale, tokens[i - 1])), [tokens, scale]);
  if (!tokens.length) return html`<p class="muted">This turn has no tokens.</p>`;
  return html`
    <${Numbers} token=${tokens[shown]} />
    <div class="tokens" ref=${box} role="region" tabindex="0" aria-label=${`Tokens of ${label}. Arrow keys go from token to token.`} onMouseOver=${over} onClick=${over} onKeyDown=${move}>
      ${words}
    </div>
    <${Cursor} box=${box} at=${shown} />
  `;
}

function word(token, i, scale, before) {
  if (token.text === null) return null;
  const mark = scale.classes[scale.of(token)]?.mark ?? "none";
  const changed = token.sampled && before?.sampled && before.version !== token.version;
  return html`${changed && html`<sup class="version-mark">v${token.version}</sup>`}<span key=${i} class=${`tok ${mark}`} data-i=${i}>${visibleToken(token.text)}</span>${token.text.includes("\n") && html`<br />`}`;
}

function firstSampled(tokens) {
  return Math.max(0, tokens.findIndex((each) => each.sampled && each.text !== null));
}

// Marks the current token without drawing all of them again.
function Cursor({ box, at }) {
  useEffect(() => {
    let place = at;
    let found = null;
    while (place >= 0 && !found) found = box.current?.querySelector(`[data-i="${place--}"]`);
    found?.classList.add("current");
    return () => found?.classList.remove("current");
  });
  return null;
}

function Numbers({ token }) {
  return html`<dl class="token-numbers" aria-live="polite">
    <div><dt>Text</dt><dd class="mono">${token.text === null ? "(part of the character before it)" : visibleToken(token.text)}</dd></div>
    ${numbersOf(token).map(([name, value]) => html`<div><dt>${name}</dt><dd>${visible(value)}</dd></div>`)}
  </dl>`;
}
