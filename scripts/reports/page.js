"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const format = (v, digits = 4) => v === null || v === undefined ? "-" : v === 0 ? "0" :
  Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(digits));

// Elements are made with text nodes only: nothing of the data is ever parsed as HTML.
function add(parent, tag, attributes = {}, ...children) {
  const svg = "svg g path rect line text circle".split(" ").includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(c => c instanceof Node ? c : String(c)));
  if (parent) parent.append(made);
  return made;
}
const tip = add(document.body, "div", {id: "tip", hidden: ""});
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, document.body.clientWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
}
function hover(element, text, focusable = false) {
  const hide = () => { tip.hidden = true; };
  element.addEventListener("mousemove", event => showTip(event, text(event)));
  element.addEventListener("mouseleave", hide);
  if (!focusable) return;
  element.setAttribute("tabindex", 0);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    showTip({clientX: box.left, clientY: box.bottom - 12}, text());
  });
  element.addEventListener("blur", hide);
}
addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
function explain(name) {
  const [definition, healthy] = data.definitions[name] || ["not in the table of metrics", ""];
  return name + "\n" + definition + (healthy ? "\nhealthy: " + healthy : "");
}
function section(id, title) {
  add(nav, "a", {href: "#" + id}, title);
  add(document.body, "h2", {id}, title);
  return add(document.body, "div");
}
function table(parent, head, rows, className = "") {
  const made = add(add(parent, "div", {class: "scroll"}), "table", {class: className});
  const top = add(add(made, "thead"), "tr");
  head.forEach(h => add(top, "th", {}, h));
  const body = add(made, "tbody");
  for (const cells of rows) {
    const line = add(body, "tr");
    cells.forEach(c => add(line, "td", {}, c));
  }
  return made;
}

// charts
// Curves: title, unit, metrics. A panel shows those of its metrics that the run has.
const panels = [
  ["Correct", "share of rollouts", "objective/verifiable_correct_rate eval/objective/verifiable_correct_rate"],
  ["By the audit", "share of rollouts", "objective/audit_correct_rate eval/objective/audit_correct_rate objective/audit_refused_rate"],
  ["Score", "", "objective/scores objective/reward_std eval/scores"],
  ["Response length", "tokens", "val/sequence_lengths val/sequence_lengths_solved eval/sequence_lengths"],
  ["Ended by themselves", "share", "val/stop_rate eval/stop_rate"],
  ["Groups", "groups a step", "batch/filtered_prompts_zero batch/filtered_prompts_solved val/total_reward_groups"],
  ["Entropy", "nats per token", "policy/entropy_avg"],
  ["KL to the reference", "nats per token", "objective/kl1_avg objective/kl2_avg"],
  ["Loss", "", "loss/policy_avg loss/total_avg"],
  ["Gradient norm", "", "optim/grad_norm"],
  ["Learning rate", "", "lr"],
  ["Clipped tokens", "share", "policy/clipfrac_avg val/rho_clipfrac"],
  ["Logprob gap, engine to learner", "nats",
    "debug/vllm_vs_local_logprob_diff_mean debug/vllm_vs_local_logprob_diff_max"],
  ["Ratios", "learner/engine, new/old", "val/rho val/ratio"],
  ["Seconds per step", "s", "time/total time/training time/generation"],
  ["Turns", "of the policy, a rollout", "val/turns eval/turns"],
  ["Tokens by who wrote them", "a rollout", "val/policy_tokens val/environment_tokens"],
  ["Calls of tools", "a rollout", "tools/aggregate/avg_calls_per_rollout eval/tools/aggregate/avg_calls_per_rollout"],
  ["Calls that failed", "share", "tools/aggregate/failure_rate eval/tools/aggregate/failure_rate"],
  ["Seconds per call", "s", "tools/aggregate/avg_runtime"],
  ["Tokens per second", "", "learner_tokens_per_second_step val/response_tokens_per_second"],
].map(([title, unit, names]) => ({title, unit, names: names.split(" ").filter(n => data.metrics[n])}));
const SMOOTHED = 150, BARS = 160;  // with more points a mean of a fortieth of them is drawn too; more steps share bars
const W = 420, H = 190, TALL = 250, L = 52, R = 16, T = 8, B = 24;
function tickStep(low, high, n = 4) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * .999);
}
function ticks(low, high, n) {
  const step = tickStep(low, high, n), out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step)
    out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}
function frame(parent, steps, low, high, log = false, labels = null, H = 190) {
  const svg = add(parent, "svg", {viewBox: `0 0 ${W} ${H}`});
  const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
  const x = s => L + (s - first) / (last - first) * (W - L - R);
  const f = log ? Math.log10 : v => v;
  const y = v => H - B - (f(v) - f(low)) / (f(high) - f(low)) * (H - B - T);
  const powers = [];
  if (log) for (let p = Math.ceil(f(low)); p <= f(high); p++) powers.push(10 ** p);
  const marks = powers.length > 1 ? powers : log ? [low, high] : ticks(low, high);
  const apart = marks.length > 1 && !log ? marks[1] - marks[0] : high - low;
  const digits = Math.min(Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / apart)) + 2), 12);
  for (const [v, label] of labels || marks.map(v => [v, format(v, digits)])) {
    add(svg, "line", {x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: "var(--line)"});
    add(svg, "text", {x: L - 5, y: y(v) + 4, "text-anchor": "end"}, label);
  }
  for (const s of ticks(first, last, 5).filter(Number.isInteger))
    add(svg, "text", {x: x(s), y: H - 7, "text-anchor": "middle"}, s);
  return {svg, x, y, first, last};
}
function chart(parent, panel) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, panel.title, add(null, "span", {class: "dim"}, panel.unit ? "  " + panel.unit : ""));
  const all = panel.names.flatMap(n => data.metrics[n]).filter(v => v !== null);
  if (!all.length) { add(card, "p", {class: "dim"}, "no finite value"); return; }
  let low = Math.min(...all), high = Math.max(...all);
  const log = low > 0 && high / low > 200;
  if (!log && low >= 0 && low < high / 2) low = 0;
  if (high - low <= Math.abs(high) * 1e-9) { low -= Math.abs(low) * .1 || .5; high += Math.abs(high) * .1 || .5; }
  if (!log) {
    const step = tickStep(low, high);
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
  }
  const {svg, x, y, first, last} = frame(card, data.steps, low, high, log);
  const legend = add(card, "div", {class: "legend"});
  panel.names.forEach((name, k) => {
    const points = data.steps.map((s, i) => [s, data.metrics[name][i]]).filter(p => p[1] !== null);
    const colour = `var(--c${k})`;
    const line = (drawn, opacity) => add(svg, "path", {fill: "none", stroke: colour, "stroke-width": 1.6, opacity,
      d: drawn.map(([s, v], i) => (i ? "L" : "M") + x(s).toFixed(1) + " " + y(v).toFixed(1)).join("")});
    const many = points.length > SMOOTHED, reach = Math.ceil(points.length / 80);
    line(points, many ? .25 : 1);
    if (many) line(points.map(([s], i) => {
      const near = points.slice(Math.max(i - reach, 0), i + reach + 1);
      return [s, near.reduce((sum, p) => sum + p[1], 0) / near.length];
    }), 1);
    if (points.length < 40) points.forEach(([s, v]) => add(svg, "circle", {cx: x(s), cy: y(v), r: 2, fill: colour}));
    hover(add(legend, "span", {"data-metric": name}, add(null, "b", {style: `background:${colour}`}), name),
      () => explain(name), true);
  });
  const cursor = add(svg, "line", {y1: T, y2: H - B, stroke: "var(--dim)", visibility: "hidden"});
  function read(i, height) {  // the values of a step, and the definition of the curve nearest to that height
    cursor.setAttribute("x1", x(data.steps[i]));
    cursor.setAttribute("x2", x(data.steps[i]));
    cursor.setAttribute("visibility", "visible");
    const value = n => data.metrics[n][i], shown = panel.names.filter(n => value(n) !== null);
    const far = n => Math.abs(y(value(n)) - height);
    const nearest = shown.reduce((best, n) => best === "" || far(n) < far(best) ? n : best, "") || panel.names[0];
    return `step ${data.steps[i]}\n` + panel.names.map(n => `${n} ${format(value(n))}`).join("\n") +
      "\n\n" + explain(nearest);
  }
  const inside = event => {
    const box = svg.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * W, (event.clientY - box.top) / box.height * H];
  };
  hover(svg, event => {
    const [across, height] = inside(event), at = first + (across - L) / (W - L - R) * (last - first);
    const closer = (best, s, j) => Math.abs(s - at) < Math.abs(data.steps[best] - at) ? j : best;
    return read(data.steps.reduce(closer, 0), height);
  });
  let chosen = data.steps.length - 1;
  const keyed = () => {
    const box = svg.getBoundingClientRect(), text = read(chosen, T);
    showTip({clientX: box.left + x(data.steps[chosen]) / W * box.width, clientY: box.bottom - 12}, text);
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
  svg.setAttribute("tabindex", 0);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${panel.title}: ${panel.names.join(", ")}; arrow keys move over the steps`);
  svg.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    chosen = Math.min(Math.max(chosen + by, 0), data.steps.length - 1);
    keyed();
    event.preventDefault();
  });
  svg.addEventListener("mouseleave", leave);
  svg.addEventListener("blur", leave);
}
function heat(parent, h) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, h.title, add(null, "span", {class: "dim"}, h.unit ? "  " + h.unit : ""));
  const rows = h.edges.length - 1, marks = h.bounds && h.edges.map((edge, j) => [j, format(edge, 5)]);
  const {svg, x, y} = frame(card, [h.steps[0], h.last + 1],
    ...(marks ? [0, rows, false, marks] : [h.edges[0], h.edges[rows], false, null]), TALL);
  const at = j => y(marks ? j : h.edges[j]);
  h.counts.forEach((column, i) => {
    const total = Math.max(column.reduce((a, b) => a + b, 0), 1), left = x(h.steps[i]);
    const width = Math.max(x(i + 1 < h.steps.length ? h.steps[i + 1] : h.last + 1) - left - .5, .5);
    column.forEach((n, j) => {
      if (!n) return;
      const share = n / total, beyond = j === 0 ? " or less" : j === rows - 1 ? " or more" : "";
      const box = add(svg, "rect", {x: left, width, y: at(j + 1), height: at(j) - at(j + 1),
        style: `fill:rgba(var(--heat),${.12 + .88 * Math.sqrt(share)})`});
      const range = `${format(h.edges[j], 5)} to ${format(h.edges[j + 1], 5)}${beyond}`;
      const text = `${range}: ${n} (${(100 * share).toFixed(1)} %)`;
      hover(box, () => `from step ${h.steps[i]}\n${text}`);
    });
  });
  const bounds = Object.entries(h.bounds || {});
  for (const [, v] of bounds) {
    const height = at(h.edges.findIndex(e => Math.abs(e - v) < 1e-5 * v));
    add(svg, "line", {x1: L, x2: W - R, y1: height, y2: height, stroke: "var(--bad)", "stroke-dasharray": "5 3"});
  }
  const named = bounds.map(([name, v]) => `${name} = ${format(v)}`).join(", ");
  if (bounds.length) add(card, "div", {class: "legend"}, add(null, "span", {}, add(null, "b", {class: "dash"}), named));
}
function stack(parent) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, "Seconds per phase", add(null, "span", {class: "dim"}, "  of each step"));
  const index = data.steps.map((s, i) => i).filter(i => data.steps[i] > 0), each = Math.ceil(index.length / BARS);
  if (!index.length) return;
  const bars = [];  // [first step, last step, mean seconds of each phase]
  for (let i = 0; i < index.length; i += each) {
    const part = index.slice(i, i + each), mean = p => part.reduce((sum, j) => sum + (data.metrics[p][j] || 0), 0);
    bars.push([data.steps[part[0]], data.steps[part[part.length - 1]], data.phases.map(p => mean(p) / part.length)]);
  }
  const sum = values => values.reduce((a, b) => a + b, 0), most = Math.max(...bars.map(b => sum(b[2])), 1e-9);
  const {svg, x, y} = frame(card, [bars[0][0], bars[bars.length - 1][1] + 1], 0, most);
  bars.forEach(([first, last, seconds]) => {
    let bottom = 0;
    seconds.forEach((v, j) => {
      const box = add(svg, "rect", {x: x(first), width: Math.max((x(last + 1) - x(first)) * .88, .5), y: y(bottom + v),
        height: y(bottom) - y(bottom + v), fill: `var(--c${j})`});
      const when = first === last ? `step ${first}` : `mean of steps ${first} to ${last}`;
      hover(box, () => `${when}\n${data.phases[j]} ${format(v)} s of ${format(sum(seconds))} s`);
      bottom += v;
    });
  });
  const legend = add(card, "div", {class: "legend"});
  data.phases.forEach((p, j) => hover(add(legend, "span", {"data-metric": p},
    add(null, "b", {style: `background:var(--c${j})`}), p), () => explain(p), true));
}

// rollouts: what is chosen stands in the address, so that a view can be linked
const gapOf = s => s[2] === null ? -1 : Math.abs(s[2] - s[1]);
const gaps = data.rollouts.flatMap(r => r.spans.map(gapOf)).filter(g => g >= 0).sort((a, b) => a - b);
const gapScale = Math.max(gaps.length ? gaps[Math.floor(.99 * (gaps.length - 1))] : 0, 1e-3);
function tokens(parent, r, colour) {
  const known = r.spans.some(s => s[2] !== null), by = colour === "gap" && !known ? "engine" : colour;
  const line = add(parent, "p", {class: "dim", id: "scale"});
  const name = by === "gap" ? "--gap" : "--low";
  const end = by === "gap" ? `${format(gapScale)} nats: |learner - engine| logprob` : "-5 nats: engine's logprob";
  if (by === "none" || !r.spans.length) line.append(r.spans.length ? "no colours" : "no tokens to colour");
  else line.append("colour from 0 ", add(null, "span", {class: "key",
    style: `background:linear-gradient(90deg,transparent,rgba(var(${name}),.85))`}), ` to ${end}`,
    by !== colour ? "; this response was not trained on at a dumped step" : "");
  const box = add(parent, "div", {class: "tokens", "data-by": by});
  if (!r.spans.length) box.append(r.text);
  for (const s of r.spans) {
    const share = by === "none" || s[3] ? 0 : by === "gap" ? gapOf(s) / gapScale : -s[1] / 5;
    const style = `background:rgba(var(${name}),${(.85 * Math.min(share, 1)).toFixed(3)})`;
    const span = add(box, "span", s[3] ? {class: "environment"} : share > .004 ? {style} : {}, s[0]);
    if (s[3]) { hover(span, () => `${JSON.stringify(s[0])}\nthe environment's: no logprob, no loss`); continue; }
    const learner = s[2] === null ? "" : `\nlearner ${format(s[2])}\ngap ${format(gapOf(s))}`;
    hover(span, () => `${JSON.stringify(s[0])}\nengine ${format(s[1])}${learner}`);
  }
}
function describe(card, r, colour) {
  if (r.versions === undefined) {  // of an evaluation: without tokens
    const facts = [["Prompt", r.prompt], ["Response", r.text], ["Label", r.label]];
    add(card, "h3", {}, `${r.step}, prompt ${r.position}: score ${format(r.score)}, ended by ${r.finish}`);
    for (const [name, text] of facts) { add(card, "h3", {}, name); add(card, "pre", {}, text); }
    return;
  }
  add(card, "h3", {}, `Step ${r.step}, prompt ${r.position}, sample ${r.sample}: score ${format(r.score)}, ` +
    (typeof r.audit === "number" ? `by the audit ${format(r.audit)}, ` : "") + `advantage ${format(r.advantage)}, ` +
    `${r.tokens} tokens, ended by ${r.finish}, weights of version ${r.versions.join(", ")}`);
  card.firstChild.setAttribute("style", "margin-bottom:.7rem");
  if (r.cut) add(card, "p", {class: "bad"}, "Too long for this page: only its beginning is shown.");
  add(card, "h3", {}, "Prompt");
  add(card, "pre", {}, r.prompt);
  add(card, "h3", {}, "Response");
  if (r.turns.length) add(card, "p", {class: "dim turns"}, "turns: " +
    r.turns.map(([role, end, n]) => `${role}, ${n} tokens, ${end}`).join("; ") + "; grey is the environment's");
  tokens(card, r, colour);
  if (!r.verifiers) return;
  add(card, "h3", {}, `Label (${r.verifiers.join(", ")}), verdict ${r.statuses.join(", ")}`);
  add(card, "pre", {}, r.label);
  add(card, "h3", {}, "Results");
  add(card, "pre", {}, r.results);
}
const PER_PAGE = 50;
function browse(parent) {
  const form = add(parent, "form"), list = add(parent, "div");
  const fields = {};
  function field(name, label, control) { add(form, "label", {}, label + " ", control); fields[name] = control; }
  field("step", "step", add(null, "select"));
  add(fields.step, "option", {value: ""}, "all");
  for (const s of new Set(data.rollouts.map(r => r.step))) add(fields.step, "option", {value: s}, s);
  field("min", "score from", add(null, "input", {type: "number", step: "any"}));
  field("max", "to", add(null, "input", {type: "number", step: "any"}));
  field("find", "text", add(null, "input", {type: "search"}));
  field("sort", "order", add(null, "select"));
  for (const o of ["run", "worst gap", "longest", "highest score"]) add(fields.sort, "option", {value: o}, o);
  field("colour", "colour by", add(null, "select"));
  for (const o of ["gap", "engine", "none"]) add(fields.colour, "option", {value: o}, o);
  const worst = r => r.spans.reduce((m, s) => Math.max(m, gapOf(s)), -1);
  const orders = {"worst gap": (a, b) => worst(b) - worst(a), longest: (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0),
    "highest score": (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)};
  let page = 0;
  function draw() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const [name, control] of Object.entries(fields)) {
      const value = wanted.get(name) ?? (control.options ? control.options[0].value : "");
      if (control.value !== value) control.value = value;  // writing it again would move the caret
    }
    const [min, max] = [fields.min, fields.max].map(f => parseFloat(f.value)), find = fields.find.value.toLowerCase();
    const chosen = data.rollouts.filter(r => (fields.step.value === "" || String(r.step) === fields.step.value) &&
      !(r.score === null ? min === min || max === max : r.score < min || r.score > max) &&
      (!find || (r.text + "\n" + r.prompt).toLowerCase().includes(find)));
    if (orders[fields.sort.value]) chosen.sort(orders[fields.sort.value]);
    page = Math.min(page, Math.max(Math.ceil(chosen.length / PER_PAGE) - 1, 0));
    list.replaceChildren();
    const line = add(list, "p", {class: "dim", id: "count"}, `${chosen.length} rollouts `);
    const from = page * PER_PAGE;
    if (chosen.length > PER_PAGE) {
      for (const [label, by] of [["previous", -1], ["next", 1]]) {
        const button = add(line, "button", {type: "button"}, label);
        button.disabled = by < 0 ? page === 0 : from + PER_PAGE >= chosen.length;
        button.addEventListener("click", () => { page = Math.max(page + by, 0); draw(); });
      }
      line.append(` ${from + 1} to ${Math.min(from + PER_PAGE, chosen.length)}`);
    }
    const head = ["step", "prompt", "score", "advantage", "tokens", "end", "worst gap", "response"];
    const made = table(list, head, [], "rows");
    [7, 9, 6, 8, 6, 7, 9].forEach((w, i) => made.rows[0].cells[i].setAttribute("style", `width:${w}%`));
    const named = wanted.get("open") ?? "", shown = chosen.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
    const key = r => `${r.step}:${r.position}:${r.sample}`;
    const open = shown.some(r => key(r) === named) ? named : shown.length ? key(shown[0]) : "";
    let opened = null;
    for (const r of shown) {
      const id = key(r), gap = worst(r);
      const row = add(made.tBodies[0], "tr", {tabindex: 0, class: id === open ? "open" : ""});
      for (const c of [r.step, `${r.position}:${r.sample}`, format(r.score), format(r.advantage), r.tokens ?? "-",
        r.finish, gap < 0 ? "-" : format(gap), r.text.slice(0, 200)]) add(row, "td", {}, c);
      const choose = () => { wanted.set("open", id); location.hash = wanted; };
      if (id === open) opened = row;
      row.addEventListener("click", choose);
      row.addEventListener("keydown", event => { if (event.key === "Enter") choose(); });
      if (id === open) {
        const cell = add(add(made.tBodies[0], "tr"), "td", {colspan: 8, class: "detail"});
        describe(add(cell, "div", {class: "card", id: "rollout"}), r, fields.colour.value);
      }
    }
    return opened;
  }
  form.addEventListener("input", () => {
    const values = Object.entries(fields).map(([n, c]) => [n, c.value]);
    const wanted = new URLSearchParams(values.filter(([, v]) => v !== ""));
    page = 0;
    history.replaceState(null, "", "#" + wanted);
    draw();
  });
  form.addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) return;
    const row = draw();  // rows above it may have closed, and the one that had the focus is gone
    if (row) { row.scrollIntoView({block: "nearest"}); row.focus({preventScroll: true}); }
  });
  draw();
}

document.title = data.name + ": report";
add(document.body, "h1", {}, data.name);
const where = data.environment;
const facts = [data.args.model_name_or_path, `${data.steps[data.steps.length - 1]} steps`];
if (data.metrics.episode) facts.push(`${Math.max(...data.metrics.episode)} episodes`);
const keys = ["device", "world_size", "git_commit"];
for (const k of keys) facts.push(`${k} ${String(where[k] ?? "unknown").slice(0, 12)}`);
if (where.git_dirty) facts.push("with uncommitted changes");
add(document.body, "p", {class: "dim"}, facts.join(", "));
const nav = add(document.body, "nav");
data.notes.forEach(n => add(document.body, "p", {class: "dim note"}, n));

const wrong = data.checks.filter(c => !c.fine).length;
const checks = section("checks", "Checks");
const verdict = `${wrong} of ${data.checks.length} ask for a look. `;
add(checks, "p", {}, add(null, "b", {class: wrong ? "bad" : "ok"}, verdict),
  add(null, "span", {class: "dim"}, "First and last are means over the first and the last fifth of the steps."));
table(checks, ["", "check", "measured", "warns when"], data.checks.map(c =>
  [add(null, "span", {class: c.fine ? "ok" : "bad"}, c.fine ? "fine" : "look"), c.name, c.numbers, c.threshold]));
const curves = add(section("curves", "Curves"), "div", {class: "grid"});
panels.filter(p => p.names.length).forEach(p => chart(curves, p));
const other = add(curves, "div"), pick = add(other, "select", {"aria-label": "metric"}), place = add(other, "div");
Object.keys(data.metrics).forEach(n => add(pick, "option", {value: n}, n));
function drawOther() {
  place.replaceChildren();
  chart(place, {title: "Any metric", unit: "", names: [pick.value]});
  add(place, "p", {class: "dim", style: "white-space:pre-line;font-size:13px"}, explain(pick.value));
}
pick.addEventListener("change", drawOther);
drawOther();
const histograms = add(section("histograms", "Histograms over time"), "div", {class: "grid"});
data.histograms.forEach(h => heat(histograms, h));
const spread = [["Response length", "tokens", "val/sequence_lengths"], ["Advantage", "", "val/advantages"]];
for (const [title, unit, name] of spread) {
  const names = [name + "_min", name, name + "_max"].filter(n => data.metrics[n]);
  if (names.length) chart(histograms, {title: title + ": least, mean, most", unit, names});
}
const time = add(section("time", "Time and throughput"), "div", {class: "beside"});
stack(time);
table(time, ["mean after step 1", "value", "floor or ceiling", "against it"], data.floors);
const rollouts = section("rollouts", "Rollouts");
if (data.rollouts.length) browse(rollouts); else add(rollouts, "p", {class: "dim"}, "none recorded");
const text = v => typeof v === "string" ? v : JSON.stringify(v);
const flags = Object.entries(data.args).map(([k, v]) => [k, text(v)]);
table(section("configuration", "Configuration"), ["flag", "value"], flags, "pairs");
table(section("environment", "Environment"), ["", ""], Object.entries(where).map(([k, v]) =>
  [k, k === "command" ? v.join(" ") : text(v)]));
document.body.setAttribute("data-ready", "");
