// Dialogs that ask before an action, and short notices of what happened.
import { html, useEffect, useRef, useState } from "./dom.js";

let show = () => {};
let say = () => {};

// Ask, and act. `sentence` says what will happen; `action` is the text of the button; `run(values)` returns a promise,
// and what it rejects with is shown in the dialog, which stays open. It may resolve to the text of a notice.
// `fields`: [{name, label, type: "number" | "text" | "select" | "checkbox", value, options, help, required}].
export function ask({ title, sentence, action, danger = false, fields = [], run }) {
  show({ title, sentence, action, danger, fields, run });
}

// A notice, which a screen reader reads as well.
export function announce(text) {
  say(text);
}

export function Dialogs() {
  const [asked, setAsked] = useState(null);
  const [notice, setNotice] = useState("");
  useEffect(() => {
    show = setAsked;
    say = setNotice;
  }, []);
  useEffect(() => {
    if (!notice) return undefined;
    const timer = setTimeout(() => setNotice(""), 8000);
    return () => clearTimeout(timer);
  }, [notice]);
  return html`
    <div class="notice" role="status" aria-live="polite">${notice && html`<p>${notice}</p>`}</div>
    ${asked && html`<${Question} ...${asked} close=${() => setAsked(null)} />`}
  `;
}

function Question({ title, sentence, action, danger, fields, run, close }) {
  const dialog = useRef(null);
  const [running, setRunning] = useState(false);
  const [error, setError] = useState(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    setRunning(true);
    setError(null);
    try {
      const said = await run(valuesOf(fields, event.target));
      dialog.current?.close();
      if (said) say(said);
    } catch (problem) {
      setError(problem.message);
      setRunning(false);
    }
  };
  return html`
    <dialog ref=${dialog} class="dialog" aria-labelledby="dialog-title" aria-describedby="dialog-text" onClose=${close}>
      <form onSubmit=${submit}>
        <h2 id="dialog-title">${title}</h2>
        <p id="dialog-text">${sentence}</p>
        ${fields.map((field) => html`<${Field} key=${field.name} ...${field} />`)}
        ${error && html`<p class="refusal" role="alert">${error}</p>`}
        <div class="buttons">
          <button type="button" class="plain" onClick=${() => dialog.current.close()}>Cancel</button>
          <button type="submit" class=${danger ? "danger" : "primary"} disabled=${running}>
            ${running ? "One moment…" : action}
          </button>
        </div>
      </form>
    </dialog>
  `;
}

function Field({ name, label, type = "text", value, options = [], help, required = false, min, step }) {
  const id = `field-${name}`;
  const described = help ? `${id}-help` : undefined;
  const given = { id, name, required, "aria-describedby": described };
  if (type === "checkbox") {
    return html`<p class="field check">
      <input ...${given} type="checkbox" defaultChecked=${value} /> <label for=${id}>${label}</label>
      ${help && html`<span class="help" id=${described}>${help}</span>`}
    </p>`;
  }
  return html`<p class="field">
    <label for=${id}>${label}</label>
    ${type === "select"
      ? html`<select ...${given}>
          ${options.map((each) => html`<option value=${each.value} selected=${each.value === value}>${each.label}</option>`)}
        </select>`
      : html`<input ...${given} type=${type} defaultValue=${value ?? ""} min=${min} step=${step} />`}
    ${help && html`<span class="help" id=${described}>${help}</span>`}
  </p>`;
}

function valuesOf(fields, form) {
  const read = ({ name, type }) => {
    const element = form.elements[name];
    if (type === "checkbox") return element.checked;
    return type === "number" ? (element.value === "" ? null : Number(element.value)) : element.value;
  };
  return Object.fromEntries(fields.map((field) => [field.name, read(field)]));
}
