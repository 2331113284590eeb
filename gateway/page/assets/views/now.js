// Now: what the deployment does at this moment, live.
import { html } from "../dom.js";
import { useLive } from "../live.js";
import { Loading } from "../parts.js";
import { sentence } from "../format.js";

export default function Now() {
  const { picture } = useLive();
  if (!picture) return html`<${Loading} />`;
  return html`<p>${sentence(picture.pipeline.trainer ?? "no trainer has reported yet")}</p>`;
}
