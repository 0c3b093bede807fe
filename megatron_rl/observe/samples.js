// The answers: filters, a list that draws only the rows in sight, and one answer with its tokens.

const ROW = 68, SPARE = 5;

const lengthOf = (sample) => sample.num_tokens ?? 0;
const oneLine = (text) => text.replace(/\s+/g, " ").trim();

function rewardBadge(sample) {
  if (sample.reward === null || sample.reward === undefined) return html("span", {class: "reward"}, "no verdict");
  return html("span", {class: `reward ${sample.reward > 0 ? "good" : "bad"}`}, `reward ${Number(sample.reward.toPrecision(4))}`);
}

function sampleView(root, tip, announce) {
  const form = root.querySelector("#filters"), list = root.querySelector("#list"), count = root.querySelector("#count");
  const article = root.querySelector("#answer"), space = html("div", {class: "space", role: "presentation"});
  list.append(space);
  let all = [], shown = [], leftOut = 0, rewards = [], chosen = null, told = "";

  function set(data) {
    const seen = new Map(), top = shown[Math.floor(list.scrollTop / ROW)], wasAtTop = list.scrollTop < ROW;
    leftOut = data.left_out;
    rewards = data.rewards;
    all = data.samples.map((sample) => {
      const name = `${sample.step}/${sample.uid}/${sample.index ?? 0}`, again = seen.get(name) || 0;
      seen.set(name, again + 1);
      return {sample, key: `${name}/${again}`, words: null};
    });
    root.hidden = !all.length;
    fillDatasets();
    filter();
    const place = wasAtTop || !top ? -1 : shown.findIndex((one) => one.key === top.key);
    if (place >= 0) { list.scrollTop = place * ROW + (list.scrollTop % ROW); drawRows(); }
  }

  function fillDatasets() {
    const select = form.elements.dataset, before = select.value;
    const names = [...new Set(all.flatMap((one) => one.sample.datasets || []))].sort();
    root.querySelector("#dataset-label").hidden = !names.length;
    select.replaceChildren(new Option("all", ""), ...names.map((name) => new Option(name, name)));
    select.value = names.includes(before) ? before : "";
  }

  function filter() {
    const given = (name) => { const text = form.elements[name].value; return text === "" ? null : Number(text); };
    const text = form.elements.text.value.toLowerCase(), dataset = form.elements.dataset.value;
    const ranges = [["reward", (one) => one.reward], ["length", lengthOf], ["step", (one) => one.step]]
      .map(([name, of]) => [given(`${name}_low`), given(`${name}_high`), of])
      .filter(([low, high]) => low !== null || high !== null);
    shown = all.filter((one) => {
      for (const [low, high, of] of ranges) {
        const value = of(one.sample);
        if (value === null || value === undefined || (low !== null && value < low) || (high !== null && value > high)) return false;
      }
      if (dataset && !(one.sample.datasets || []).includes(dataset)) return false;
      if (!text) return true;
      const {uid, prompt, thought, answer, reason} = one.sample;
      one.words ??= [uid, prompt, thought + answer, reason || ""].join("\n").toLowerCase();
      return one.words.includes(text);
    });
    const [by, way] = form.elements.order.value.split("_"), sign = way === "up" ? 1 : -1;
    const of = by === "length" ? lengthOf : (sample) => sample[by];
    const place = new Map(shown.map((one, i) => [one, i]));
    shown.sort((a, b) => {
      const left = of(a.sample), right = of(b.sample);
      if ((left === null) !== (right === null)) return left === null ? 1 : -1;
      return left === right ? place.get(a) - place.get(b) : sign * (left - right);
    });
    const others = leftOut ? `; ${leftOut.toLocaleString("en-US")} recorded answers are left out, evenly over the steps, to bound the size of the page` : "";
    count.textContent = `${shown.length.toLocaleString("en-US")} of ${all.length.toLocaleString("en-US")} answers${others}`;
    space.style.height = `${shown.length * ROW}px`;
    if (!shown.some((one) => one.key === chosen)) chosen = shown.length ? shown[0].key : null;
    drawRows();
    drawAnswer();
  }

  function drawRows() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(row(i));
    space.replaceChildren(...rows);
    const place = shown.findIndex((one) => one.key === chosen);
    if (place >= first && place < last) list.setAttribute("aria-activedescendant", `option-${place}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function row(i) {
    const {sample, key} = shown[i], answer = oneLine((sample.answer || sample.thought).slice(0, 300));
    const head = html("div", {class: "head"}, rewardBadge(sample), html("span", {}, `step ${sample.step}`),
      html("span", {}, `${lengthOf(sample).toLocaleString("en-US")} tokens`), html("span", {}, oneLine(sample.prompt.slice(0, 120))));
    const option = html("div", {class: "option", role: "option", id: `option-${i}`, "aria-selected": key === chosen,
      "aria-setsize": shown.length, "aria-posinset": i + 1}, head, html("div", {class: "line"}, answer || "(empty)"));
    option.style.top = `${i * ROW}px`;
    option.addEventListener("click", () => choose(i));
    return option;
  }

  function choose(i) {
    chosen = shown[i].key;
    if (i * ROW < list.scrollTop) list.scrollTop = i * ROW;
    if ((i + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (i + 1) * ROW - list.clientHeight;
    drawRows();
    drawAnswer();
  }

  list.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1), place = shown.findIndex((one) => one.key === chosen);
    const moves = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -shown.length, End: shown.length};
    if (!(event.key in moves) || !shown.length) return;
    event.preventDefault();
    choose(Math.min(shown.length - 1, Math.max(0, place + moves[event.key])));
  });
  list.addEventListener("scroll", drawRows, {passive: true});
  new ResizeObserver(drawRows).observe(list);
  form.addEventListener("input", () => { list.scrollTop = 0; filter(); });
  form.addEventListener("reset", () => setTimeout(() => { list.scrollTop = 0; filter(); }));
  form.addEventListener("submit", (event) => event.preventDefault());

  function drawAnswer() {
    const found = shown.find((one) => one.key === chosen), now = found ? JSON.stringify([found.key, found.sample]) : "";
    if (now === told) return; // what is read now stays as it is: its scroll and its focus
    told = now;
    tip.hide();
    if (!found) return article.replaceChildren(html("p", {class: "muted"}, "No answer fits the filters."));
    const sample = found.sample, text = sample.thought + sample.answer, table = sample.tokens;
    const parts = [html("h3", {id: "answer-title"}, sample.index === undefined ? sample.uid : `${sample.uid}, answer ${sample.index}`)];
    const head = html("div", {class: "head"}, rewardBadge(sample));
    if (sample.reason) head.append(html("span", {}, sample.reason));
    parts.push(head, facts(sample));
    parts.push(html("h4", {}, "Prompt"), html("pre", {tabindex: 0, role: "region", "aria-label": "Prompt"}, sample.prompt));
    const pictures = (isRead) => (sample.images || []).filter(([turn]) => isRead === turn > 0).forEach(([turn, src]) => {
      const told = turn ? `An image that the model read after its turn ${turn}` : "An image of the prompt";
      if (turn) parts.push(html("p", {class: "muted small"}, told));
      parts.push(html("img", {src, alt: told}));
    });
    pictures(false);
    const expected = sample.ground_truth === null || sample.ground_truth === undefined ? "" : `, expected ${typeof sample.ground_truth === "string" ? sample.ground_truth : JSON.stringify(sample.ground_truth)}`;
    parts.push(html("h4", {}, `Answer${expected}`), legend(sample));
    parts.push(table ? tokenText(sample, text, tip, announce) : plainText(sample));
    if (!table) parts.push(html("p", {class: "muted small"}, "The record of this answer has no tokens."));
    pictures(true);
    article.replaceChildren(...parts);
  }

  function facts(sample) {
    const told = [["Step", sample.step], ["Finish", sample.finish === "length" ? "length: cut by the length budget" : sample.finish],
      ["Response, tokens", sample.num_tokens], ["Reasoning, tokens", sample.num_thought_tokens], ["Prompt, tokens", sample.num_prompt_tokens],
      ["Data set", (sample.datasets || []).join(", ") || undefined], ["Advantage", sample.advantage],
      ["Reward after shaping", sample.shaped]];
    (sample.parts || []).forEach((part, i) => told.push([rewards[i] || `reward ${i + 1}`, part === null ? "no score" : part]));
    for (const [name, value] of Object.entries(sample.details || {})) told.push([name, typeof value === "string" ? value : JSON.stringify(value)]);
    const entries = told.filter(([, value]) => value !== undefined && value !== null);
    return html("dl", {}, ...entries.map(([name, value]) => html("div", {}, html("dt", {}, name),
      html("dd", {}, typeof value === "number" ? written(value) : String(value)))));
  }

  return {set};
}

function legend(sample) {
  const keys = html("div", {class: "keys"}, html("span", {class: "sampled"}, "answer"));
  if (sample.thought) keys.append(html("span", {class: "thought"}, "reasoning"));
  if (sample.tokens && sample.tokens.actions.length > 1) keys.append(html("span", {class: "masked"}, "forced or from outside, not trained"));
  return keys;
}

function plainText(sample) {
  const box = html("pre", {tabindex: 0, role: "region", "aria-label": "Answer"});
  if (sample.thought) box.append(html("span", {class: "thought"}, sample.thought));
  box.append(sample.answer);
  return box;
}

// For each token: whether the policy sampled it, and the version of the weights.
function unrolled(table) {
  const sampled = [], versions = [];
  table.actions.forEach((length, i) => { for (let k = 0; k < length; k++) sampled.push(i % 2 === 0); });
  for (const [version, length] of table.versions) for (let k = 0; k < length; k++) versions.push(version);
  return {sampled, versions};
}

// One element for each piece of text. A piece may have several tokens, which together are one character.
function tokenText(sample, text, tip, announce) {
  const table = sample.tokens, {sampled, versions} = unrolled(table);
  const characters = Array.from(text), thoughtEnds = Array.from(sample.thought).length;
  const box = html("pre", {"aria-label": "Tokens of the answer; arrow keys move from token to token", role: "group"});
  const pieces = [];
  let place = 0, first = 0;
  table.lengths.forEach((length, i) => {
    if (length === 0 && i < table.lengths.length - 1) return;
    const own = characters.slice(place, place + length).join(""), classes = ["token"];
    const isSampled = sampled.slice(first, i + 1).every(Boolean);
    classes.push(isSampled ? (place < thoughtEnds ? "thought" : "sampled") : "masked");
    if (/^\n+$/.test(own)) classes.push("break");
    const element = html("span", {class: classes.join(" "), tabindex: pieces.length ? -1 : 0}, own);
    pieces.push({element, own, first, last: i});
    element.dataset.piece = pieces.length - 1;
    place += length;
    first = i + 1;
  });
  box.append(...pieces.map((piece) => piece.element));

  function tell(piece) {
    const rows = [html("b", {}, JSON.stringify(piece.own))];
    const line = (name, value) => rows.push(html("div", {class: "row"}, html("span", {}, name), html("span", {}, value)));
    for (let i = piece.first; i <= piece.last; i++) {
      line("token", `${(i + 1).toLocaleString("en-US")} of ${table.lengths.length.toLocaleString("en-US")}`);
      line("", sampled[i] ? "sampled" : "forced or from outside, not trained");
      const columns = Object.fromEntries(Object.entries(table.columns).map(([name, values]) => [name, values[i]]));
      const engine = columns.logp_rollout === null || !sampled[i] ? null : columns.logp_rollout / 100;
      if (engine !== null) line("log-prob (engine)", `${engine.toFixed(2)} (${(100 * Math.exp(engine)).toFixed(engine < -4.6 ? 3 : 0)} %)`);
      if (versions[i] >= 0) line("weights of version", String(versions[i]));
      if (engine !== null && Number.isFinite(columns.logp)) {
        line("log-prob (trainer)", columns.logp.toFixed(2));
        line("ratio", written(Math.exp(columns.logp - engine)));
      }
      for (const [name, value] of Object.entries(columns)) {
        if (!["logp_rollout", "logp"].includes(name) && Number.isFinite(value)) line(name, written(value));
      }
      if (!("advantage" in table.columns) && sampled[i] && Number.isFinite(sample.advantage)) line("advantage (of the answer)", written(sample.advantage));
      for (const [at, kind, value] of table.rewards || []) if (at === i) line(`reward: ${kind}`, written(value));
    }
    tip.show(rows, () => piece.element.getClientRects()[0] || box.getBoundingClientRect());
  }

  function move(to) {
    const next = pieces[Math.min(pieces.length - 1, Math.max(0, to))];
    box.querySelector('[tabindex="0"]').tabIndex = -1;
    next.element.tabIndex = 0;
    next.element.focus();
    announce(tip.text());
  }

  const pieceOf = (event) => (event.target.dataset && event.target.dataset.piece !== undefined ? pieces[Number(event.target.dataset.piece)] : null);
  box.addEventListener("pointerover", (event) => { const piece = pieceOf(event); if (piece) tell(piece); });
  box.addEventListener("pointerleave", () => tip.hide());
  box.addEventListener("focusin", (event) => { const piece = pieceOf(event); if (piece) tell(piece); });
  box.addEventListener("focusout", () => tip.hide());
  box.addEventListener("keydown", (event) => {
    const piece = pieceOf(event), moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -pieces.length, End: pieces.length};
    if (event.key === "Escape") tip.hide();
    if (!piece || !(event.key in moves)) return;
    event.preventDefault();
    move(Number(event.target.dataset.piece) + moves[event.key]);
  });
  return box;
}
