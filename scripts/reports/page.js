"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function format(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(+value.toPrecision(digits));
}

// Elements are made with text nodes only: nothing of the data is ever parsed as HTML.
const SVG = ["svg", "path", "line", "text"];
function add(parent, tag, attributes = {}, ...children) {
  const made = SVG.includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(child => child instanceof Node ? child : String(child)));
  if (parent) parent.append(made);
  return made;
}

const tip = add(document.body, "div", {id: "tip", hidden: ""});
function hover(element, text) {
  element.addEventListener("mousemove", event => {
    tip.textContent = text(event);
    tip.hidden = false;
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
    tip.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 24), 4) + "px";
  });
  element.addEventListener("mouseleave", () => { tip.hidden = true; });
}
function explain(name) {
  return `${name}\n${data.definitions[name] || "has no definition"}`;
}
function section(id, title) {
  add(nav, "a", {href: "#" + id}, title);
  add(document.body, "h2", {id}, title);
  return add(document.body, "div");
}
function table(parent, head, rows, className = "") {
  const made = add(add(parent, "div", {class: "scroll"}), "table", {class: className});
  const top = add(add(made, "thead"), "tr");
  head.forEach(name => add(top, "th", {}, name));
  const body = add(made, "tbody");
  for (const cells of rows) {
    const line = add(body, "tr");
    cells.forEach(cell => add(line, "td", {}, cell));
  }
}

// --- curves: title, unit, metrics. A panel shows those of its metrics that the run has -------------------------------
const PANELS = [
  ["Correct", "share of rollouts", "objective/verifiable_correct_rate eval/objective/verifiable_correct_rate"],
  ["By the audit", "share of rollouts", "objective/audit_correct_rate objective/audit_refused_rate"],
  ["Score", "", "objective/scores objective/reward_std eval/scores"],
  ["Response length", "tokens", "val/sequence_lengths val/sequence_lengths_max eval/sequence_lengths"],
  ["Ended by themselves", "share", "val/stop_rate eval/stop_rate"],
  ["Groups", "groups a step", "batch/filtered_prompts_zero batch/filtered_prompts_solved val/total_reward_groups"],
  ["Entropy", "nats per token", "policy/entropy_avg"],
  ["KL to the reference", "nats per token", "objective/kl1_avg objective/kl2_avg"],
  ["Loss", "", "loss/policy_avg loss/total_avg"],
  ["Gradient norm", "", "optim/grad_norm"],
  ["Learning rate", "", "lr"],
  ["Clipped tokens", "share", "policy/clipfrac_avg val/rho_clipfrac"],
  ["Logprob gap", "nats", "debug/vllm_vs_local_logprob_diff_mean debug/vllm_vs_local_logprob_diff_max"],
  ["Ratios", "learner/engine, new/old", "val/rho val/ratio"],
  ["Turns and calls", "a rollout", "val/turns tools/aggregate/avg_calls_per_rollout tools/aggregate/failure_rate"],
  ["Seconds per step", "s", ["time/total", ...data.phases].join(" ")],
  ["Tokens per second", "", "learner_tokens_per_second_step val/response_tokens_per_second"],
  ["Use of the hardware", "share", "learner_mfu val/engine_bandwidth_share val/learner_idle_share val/engine_idle_share"],
];
const WIDTH = 420, HEIGHT = 190, LEFT = 56, RIGHT = 404, TOP = 8, BOTTOM = 166;

function chart(parent, title, unit, names) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, title, add(null, "span", {class: "dim"}, "  " + unit));
  const all = names.flatMap(name => data.metrics[name]).filter(value => value !== null);
  if (!all.length) return add(card, "p", {class: "dim"}, "no finite value");
  const low = Math.min(...all), high = Math.max(...all);
  const first = data.steps[0], last = data.steps[data.steps.length - 1];
  const isLog = low > 0 && high / low > 200;
  const scale = isLog ? Math.log10 : value => value;
  const share = (value, from, to) => to > from ? (value - from) / (to - from) : 0.5;
  const x = step => LEFT + share(step, first, last) * (RIGHT - LEFT);
  const y = value => BOTTOM - share(scale(value), scale(low), scale(high)) * (BOTTOM - TOP);

  const svg = add(card, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  for (const tick of isLog ? [low, high] : [low, low + (high - low) / 2, high]) {
    add(svg, "line", {x1: LEFT, x2: RIGHT, y1: y(tick), y2: y(tick), stroke: "var(--line)"});
    add(svg, "text", {x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end"}, format(tick));
  }
  for (const step of [first, last]) add(svg, "text", {x: x(step), y: HEIGHT - 7, "text-anchor": "middle"}, step);

  const legend = add(card, "div", {class: "legend"});
  names.forEach((name, i) => {
    const colour = `var(--c${i % 6})`;
    const points = data.steps.map((step, j) => [step, data.metrics[name][j]]).filter(point => point[1] !== null);
    const path = "M" + points.map(([step, value]) => x(step).toFixed(1) + " " + y(value).toFixed(1)).join("L");
    add(svg, "path", {fill: "none", stroke: colour, "stroke-width": 1.6, "stroke-linecap": "round", d: path});
    const label = add(null, "b", {style: `background:${colour}`});
    hover(add(legend, "span", {"data-metric": name}, label, name), () => explain(name));
  });
  hover(svg, event => {
    const box = svg.getBoundingClientRect();
    const across = (event.clientX - box.left) / box.width * WIDTH;
    const far = i => Math.abs(x(data.steps[i]) - across);
    const i = [...data.steps.keys()].reduce((best, j) => far(j) < far(best) ? j : best, 0);
    return [`step ${data.steps[i]}`, ...names.map(name => `${name} ${format(data.metrics[name][i])}`)].join("\n");
  });
}

// --- rollouts: what is chosen stands in the address, so that a view can be linked -------------------------------------
const MOST_ROWS = 200;
const gapOf = span => span[2] === null ? -1 : Math.abs(span[2] - span[1]);
const worstGap = rollout => rollout.spans.reduce((worst, span) => Math.max(worst, gapOf(span)), -1);
const gaps = data.rollouts.flatMap(rollout => rollout.spans.map(gapOf)).filter(gap => gap >= 0).sort((a, b) => a - b);
const gapScale = Math.max(gaps.length ? gaps[Math.floor(0.99 * (gaps.length - 1))] : 0, 1e-3);
const ORDERS = {
  run: null,
  "worst gap": (a, b) => worstGap(b) - worstGap(a),
};

// A response in colours: by the gap where the learner's logprobs are known, else by the engine's logprob.
function tokens(parent, rollout) {
  const byGap = rollout.spans.some(span => span[2] !== null);
  const end = byGap ? `${format(gapScale)} nats: |learner - engine| logprob` : "-5 nats: engine's logprob";
  if (rollout.spans.length) add(parent, "p", {class: "dim"}, `colour from 0 to ${end}`);
  const box = add(parent, "div", {class: "tokens", "data-by": byGap ? "gap" : "engine"});
  if (!rollout.spans.length) box.append(rollout.text);
  for (const span of rollout.spans) {
    const [text, engine, learner, byEnvironment] = span;
    if (byEnvironment) {
      hover(add(box, "span", {class: "environment"}, text), () => "the environment's: no logprob, no loss");
      continue;
    }
    const share = Math.min(byGap ? gapOf(span) / gapScale : -engine / 5, 1);
    const colour = `background:rgba(var(${byGap ? "--gap" : "--low"}),${(0.85 * Math.max(share, 0)).toFixed(3)})`;
    const more = learner === null ? "" : `\nlearner ${format(learner)}\ngap ${format(gapOf(span))}`;
    hover(add(box, "span", {style: colour}, text), () => `${JSON.stringify(text)}\nengine ${format(engine)}${more}`);
  }
}
function describe(card, rollout) {
  const facts = [`Step ${rollout.step}, prompt ${rollout.position}, sample ${rollout.sample}: score ` +
    format(rollout.score)];
  if (typeof rollout.audit === "number") facts.push(`by the audit ${format(rollout.audit)}`);
  if (rollout.versions) facts.push(`advantage ${format(rollout.advantage)}`, `${rollout.tokens} tokens`,
    `weights of version ${rollout.versions.join(", ")}`);
  add(card, "h3", {}, [...facts, `ended by ${rollout.finish}`].join(", "));
  if (rollout.cut) add(card, "p", {class: "bad"}, "Too long for this page: only its beginning is shown.");
  add(card, "h3", {}, "Prompt");
  add(card, "pre", {}, rollout.prompt);
  add(card, "h3", {}, "Response");
  const turns = (rollout.turns ?? []).map(([role, end, count]) => `${role}, ${count} tokens, ${end}`);
  if (turns.length) add(card, "p", {class: "dim"}, `turns: ${turns.join("; ")}; grey is the environment's`);
  tokens(card, rollout);
  add(card, "h3", {}, rollout.verifiers ? `Label (${rollout.verifiers.join(", ")})` : "Label");
  add(card, "pre", {}, rollout.label);
  if (!rollout.verifiers) return;
  add(card, "h3", {}, "Results");
  add(card, "pre", {}, rollout.results);
}
function browse(parent) {
  const form = add(parent, "form"), list = add(parent, "div"), fields = {};
  const field = (name, label, control) => {
    add(form, "label", {}, label + " ", control);
    fields[name] = control;
    return control;
  };
  const steps = field("step", "step", add(null, "select"));
  add(steps, "option", {value: ""}, "all");
  for (const step of new Set(data.rollouts.map(rollout => rollout.step))) add(steps, "option", {value: step}, step);
  field("min", "score from", add(null, "input", {type: "number", step: "any"}));
  field("max", "to", add(null, "input", {type: "number", step: "any"}));
  field("find", "text", add(null, "input", {type: "search"}));
  const orders = field("sort", "order", add(null, "select"));
  for (const name of Object.keys(ORDERS)) add(orders, "option", {value: name}, name);

  function wanted(rollout) {
    const min = parseFloat(fields.min.value), max = parseFloat(fields.max.value);
    const find = fields.find.value.toLowerCase();
    if (steps.value !== "" && String(rollout.step) !== steps.value) return false;
    if (rollout.score === null && !(isNaN(min) && isNaN(max))) return false;
    if (rollout.score < min || rollout.score > max) return false;
    return `${rollout.text}\n${rollout.prompt}`.toLowerCase().includes(find);
  }
  function draw() {
    const address = new URLSearchParams(location.hash.slice(1));
    for (const [name, control] of Object.entries(fields)) {
      const value = address.get(name) ?? (name === "sort" ? "run" : "");
      if (control.value !== value) control.value = value;  // writing it again would move the caret
    }
    const chosen = data.rollouts.filter(wanted);
    if (ORDERS[orders.value]) chosen.sort(ORDERS[orders.value]);
    const shown = chosen.slice(0, MOST_ROWS);
    list.replaceChildren();
    const more = chosen.length > MOST_ROWS ? `, of which the first ${MOST_ROWS} are shown: filter them` : "";
    add(list, "p", {class: "dim", id: "count"}, `${chosen.length} rollouts${more}`);
    const line = (parent, cells) => cells.forEach(cell => add(parent, "span", {}, cell));
    const head = ["step", "prompt", "score", "advantage", "tokens", "end", "worst gap", "response"];
    line(add(list, "div", {class: "row dim"}), head);
    for (const rollout of shown) {
      const details = add(list, "details");
      const gap = worstGap(rollout);
      line(add(details, "summary", {class: "row"}), [rollout.step, `${rollout.position}:${rollout.sample}`,
        format(rollout.score), format(rollout.advantage), rollout.tokens ?? "-", rollout.finish,
        gap < 0 ? "-" : format(gap), rollout.text.slice(0, 200)]);
      details.addEventListener("toggle", () => describe(add(details, "div", {class: "card"}), rollout), {once: true});
      if (rollout === shown[0]) details.open = true;
    }
  }
  form.addEventListener("input", () => {
    const values = Object.entries(fields).map(([name, control]) => [name, control.value]);
    history.replaceState(null, "", "#" + new URLSearchParams(values.filter(([, value]) => value !== "")));
    draw();
  });
  form.addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", () => { if (location.hash.includes("=")) draw(); });
  draw();
}

// --- the page ---------------------------------------------------------------------------------------------------------
document.title = data.name + ": report";
add(document.body, "h1", {}, data.name);
add(document.body, "p", {class: "dim"}, `${data.args.model_name_or_path}, ${data.steps[data.steps.length - 1]} steps`);
const nav = add(document.body, "nav");
data.notes.forEach(note => add(document.body, "p", {class: "dim note"}, note));

const checks = section("checks", "Checks");
const wrong = data.checks.filter(check => !check.fine).length;
add(checks, "p", {class: wrong ? "bad" : "ok"}, `${wrong} of ${data.checks.length} ask for a look. `,
  add(null, "span", {class: "dim"}, "First and last are means over the first and the last fifth of the steps."));
table(checks, ["", "check", "measured", "warns when"], data.checks.map(check =>
  [add(null, "span", {class: check.fine ? "ok" : "bad"}, check.fine ? "fine" : "look"), check.name, check.numbers,
    check.threshold]));

const curves = add(section("curves", "Curves"), "div", {class: "grid"});
for (const [title, unit, names] of PANELS) {
  const known = names.split(" ").filter(name => data.metrics[name]);
  if (known.length) chart(curves, title, unit, known);
}
const others = add(curves.parentElement, "details");
add(others, "summary", {}, "Every metric by itself");
const every = add(others, "div", {class: "grid"});
for (const name of Object.keys(data.metrics)) chart(every, name, "", [name]);

const rollouts = section("rollouts", "Rollouts");
if (data.rollouts.length) browse(rollouts);
else add(rollouts, "p", {class: "dim"}, "none recorded");
const pairs = facts => Object.entries(facts).map(([name, value]) =>
  [name, typeof value === "string" ? value : JSON.stringify(value)]);
table(section("configuration", "Configuration"), ["flag", "value"], pairs(data.args), "pairs");
table(section("environment", "Environment"), ["fact", "value"], pairs(data.environment), "pairs");
document.body.setAttribute("data-ready", "");
