// The members of a group beside each other: rewards, advantages, verdicts.
import { html } from "../dom.js";
import { useGet } from "../api.js";
import { figure, number } from "../format.js";
import { Badge, Card, Id, Table } from "../parts.js";
import { link } from "../router.js";
import { verdictTone, verdictWords } from "./verdicts.js";
import { visible } from "./visible.js";

const MOST = 200;

// An admin's key reads what the trainer compared; any key reads the sessions of the group.
export function useGroup(groupId, me) {
  const id = encodeURIComponent(groupId);
  const compared = useGet(me.role === "admin" ? `/admin/groups/${id}` : null);
  const listed = useGet(me.role !== "admin" || compared.error ? `/sessions?group_id=${id}&limit=${MOST}` : null);
  if (compared.data) return compared.data;
  if (!listed.data) return null;
  const members = listed.data.data.map(({ session_id, reward, verdict }) => ({ session_id, reward, advantage: null, verdict: verdict.code, step: verdict.step, version: verdict.version }));
  return { group_id: groupId, size: null, mean: null, std: null, members };
}

export function Group({ session, me, compared, onCompare }) {
  const group = useGroup(session.group_id, me);
  if (!group) return null;
  const others = group.members.some((each) => each.session_id !== session.session_id);
  return html`<${Card} title=${`Group ${visible(session.group_id)}`} note=${groupNote(group)}>
    <${Members} group=${group} own=${session.session_id}
      tools=${others && ((each) => each.session_id !== session.session_id && html`<button class="small" aria-pressed=${each.session_id === compared ? "true" : "false"} onClick=${() => onCompare(each.session_id === compared ? "" : each.session_id)}>Beside this one<span class="hidden">: ${visible(each.session_id)}</span></button>`)} />
  <//>`;
}

export function groupNote({ members, size, mean, std }) {
  const known = `${number(members.length)}${size ? ` of ${number(size)}` : ""} sessions.`;
  return mean === null || mean === undefined ? known : `${known} Rewards: mean ${figure(mean)}, standard deviation ${figure(std)}.`;
}

export function Members({ group, own, tools }) {
  const code = (each) => each.verdict?.code ?? each.verdict ?? "open";
  const columns = [
    { title: "Session", wide: true, cell: (each) => html`<a class="mono" href=${link("sessions", [each.session_id])} aria-current=${each.session_id === own ? "true" : undefined}><${Id} text=${visible(each.session_id)} /></a>` },
    { title: "Reward", numeric: true, cell: (each) => figure(each.reward) },
    { title: "Advantage", numeric: true, cell: (each) => figure(each.advantage) },
    { title: "Verdict", cell: (each) => html`<${Badge} tone=${verdictTone(code(each))}>${verdictWords(code(each))}<//>` },
    { title: "Step", numeric: true, rare: true, cell: (each) => (each.step === null || each.step === undefined ? "" : number(each.step)) },
    { title: "Version", numeric: true, rare: true, cell: (each) => (each.version === null || each.version === undefined ? "" : html`<a href=${link("lineage", [String(each.version)])}>${each.version}</a>`) },
  ];
  if (tools) columns.push({ title: "Compare", rare: true, cell: tools });
  return html`<${Table} columns=${columns} rows=${group.members.slice(0, MOST)} rowKey=${(each) => each.session_id} caption="Members of the group" />`;
}
