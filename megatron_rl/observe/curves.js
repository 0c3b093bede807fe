// The curves: one SVG for each panel of observe/panels.py. All panels have the same axis of steps and the same cursor.

const HEIGHT = 220, TOP = 14, BOTTOM = 24, LEFT = 52, RIGHT = 10, NEAR = 5;

function svg(name, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 30));
const colourClass = (index) => (index < 0 ? "grey" : `c${index}`);

function written(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return value.toLocaleString("en-US", {maximumSignificantDigits: size >= 1000 ? 7 : 4});
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const pace = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / pace - 1e-9); i * pace <= high + pace * 1e-9; i++) ticks.push(i * pace || 0); // no minus zero
  return ticks;
}

function logTicks(low, high) {
  const first = Math.floor(low), last = Math.ceil(high), pace = Math.max(1, Math.ceil((last - first) / 5));
  const ticks = [];
  for (let power = first; power <= last; power += pace) {
    for (const factor of last - first <= 1 ? [1, 2, 5] : [1]) ticks.push(power + Math.log10(factor));
  }
  return ticks.filter((one) => one >= low - 1e-9 && one <= high + 1e-9);
}

// The ends of the axis of values, and the function that an axis applies to a value.
function valueAxis(panel) {
  let values = panel.lines.flatMap((line) => line.values);
  if (panel.kind === "stack") values = panel.lines[0].values.map((_, i) => panel.lines.reduce((sum, one) => sum + one.values[i], 0));
  const of = panel.scale === "log" ? (value) => Math.log10(Math.max(value, 1e-300)) : (value) => value;
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, of(value)); high = Math.max(high, of(value)); }
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low = panel.low === null ? low - margin : of(panel.low);
  high = panel.high === null ? high + margin : of(panel.high);
  return {low, high, of};
}

function curveView(container, tip, announce) {
  let data = {panels: [], messages: [], resumed_at: []}, views = [], steps = [], marked = new Map();

  function set(next) {
    data = next;
    marked = new Map();
    for (const {step, text} of data.messages) marked.set(step, [...(marked.get(step) || []), text]);
    steps = [...new Set([...data.panels.flatMap((panel) => panel.lines.flatMap((line) => line.steps)), ...marked.keys()])];
    steps.sort((a, b) => a - b);
    const focused = views.findIndex((view) => view.picture === document.activeElement);
    const at = focused < 0 ? null : views[focused].step;
    views = data.panels.map(view);
    container.replaceChildren(...views.map((one) => one.figure));
    draw();
    if (views[focused]) {
      views[focused].picture.focus({preventScroll: true});
      if (at !== null) moveTo(views[focused], at);
    }
  }

  function view(panel, index) {
    const legend = html("div", {class: "legend"});
    for (const line of panel.lines) {
      if (!line.label || line.is_thin) continue;
      legend.append(html("span", {}, html("span", {class: `run ${colourClass(line.colour)}`}), line.label));
    }
    const picture = svg("svg", {tabindex: 0, role: "img", "aria-label": `${panel.title}: ${summary(panel)}`});
    picture.setAttribute("aria-describedby", "curves-keys");
    const figure = html("figure", {class: "panel"}, html("h3", {id: `panel-${index}`}, panel.title), picture, legend);
    const own = {panel, picture, figure, step: null, x: null, cursor: null, axis: valueAxis(panel)};
    own.known = panel.lines.map((line) => new Map(line.steps.map((step, i) => [step, line.values[i]])));
    picture.addEventListener("pointermove", (event) => moveTo(own, nearest(own, event)));
    picture.addEventListener("pointerleave", () => hide());
    picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) moveTo(own, own.step ?? steps[steps.length - 1]); });
    picture.addEventListener("blur", () => hide());
    picture.addEventListener("keydown", (event) => key(own, event));
    return own;
  }

  function summary(panel) {
    const told = panel.lines.filter((line) => !line.is_thin).map((line) => {
      const last = line.steps.length - 1;
      return `${line.label || "value"} from ${written(line.values[0])} at step ${line.steps[0]} to ${written(line.values[last])} at step ${line.steps[last]}`;
    });
    return told.join("; ");
  }

  // The panels in sight are drawn at once, and the others when there is time.
  function draw() {
    for (const one of views) one.cursor = null;
    for (const one of views) {
      const {top, bottom} = one.picture.getBoundingClientRect();
      if (bottom > 0 && top < innerHeight) drawOne(one);
    }
    drawOthers();
  }

  function drawOthers() {
    if (views.every((one) => one.cursor)) return;
    whenIdle(() => {
      const next = views.find((one) => !one.cursor);
      if (next) drawOne(next);
      drawOthers();
    });
  }

  function drawOne(own) {
    const {panel, picture, axis} = own, width = picture.clientWidth || 430;
    picture.replaceChildren();
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const first = steps[0], last = steps[steps.length - 1], pad = panel.kind === "stack" ? 0.5 : 0;
    const inner = width - LEFT - RIGHT - 8;
    const x = (step) => LEFT + 4 + ((step - first + pad) / (last - first + 2 * pad || 1)) * inner;
    const y = (value) => TOP + (1 - (axis.of(value) - axis.low) / (axis.high - axis.low || 1)) * (HEIGHT - TOP - BOTTOM);
    own.x = x;
    const ticks = panel.scale === "log" ? logTicks(axis.low, axis.high) : linearTicks(axis.low, axis.high, 4);
    for (const tick of ticks) {
      const value = panel.scale === "log" ? 10 ** tick : tick;
      svg("line", {class: tick === 0 && panel.scale !== "log" ? "axis" : "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)}, picture);
      svg("text", {x: LEFT - 7, y: y(value) + 4, "text-anchor": "end"}, picture).textContent = written(Number(value.toPrecision(6)));
    }
    svg("line", {class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM}, picture);
    for (const tick of linearTicks(first, last, width > 420 ? 8 : 5).filter(Number.isInteger)) {
      svg("text", {x: x(tick), y: HEIGHT - 7, "text-anchor": "middle"}, picture).textContent = tick.toLocaleString("en-US");
    }
    if (panel.kind === "stack") drawStack(panel.lines, x, y, picture);
    else drawLines(panel, x, y, picture);
    for (const step of data.resumed_at) svg("line", {class: "resumed", x1: x(step - 0.5), x2: x(step - 0.5), y1: TOP, y2: HEIGHT - BOTTOM}, picture);
    for (const step of marked.keys()) {
      svg("line", {class: "mark", x1: x(step), x2: x(step), y1: TOP - 4, y2: HEIGHT - BOTTOM}, picture);
      svg("path", {class: "flag", d: `M${x(step) - 5} ${TOP - 12}h10l-5 9z`}, picture);
    }
    own.cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"}, picture);
  }

  function drawLines(panel, x, y, picture) {
    for (const band of panel.bands) {
      const there = band.steps.map((step, i) => `${x(step)} ${y(band.high[i])}`);
      const back = band.steps.map((step, i) => `${x(step)} ${y(band.low[i])}`).reverse();
      svg("path", {class: `band ${colourClass(band.colour)}`, d: `M${[...there, ...back].join("L")}Z`}, picture);
    }
    for (const line of panel.lines) {
      const points = line.steps.map((step, i) => `${x(step).toFixed(1)} ${y(line.values[i]).toFixed(1)}`);
      const own = colourClass(line.colour);
      svg("path", {class: `curve ${own}${line.is_thin ? " thin" : ""}`, d: `M${points.join("L")}`}, picture);
      if (!line.has_markers && line.steps.length > 1) continue;
      line.steps.forEach((step, i) => svg("circle", {class: `dot ${own}`, cx: x(step), cy: y(line.values[i]), r: 3}, picture));
    }
  }

  // A layer is one outline for each run of adjacent steps: up and right along the tops, and back along the bottoms.
  function drawStack(layers, x, y, picture) {
    const bottom = layers[0].steps.map(() => 0);
    for (const layer of layers) {
      let path = "", back = "";
      layer.steps.forEach((step, i) => {
        const low = y(bottom[i]).toFixed(1);
        bottom[i] += layer.values[i];
        const left = x(step - 0.5).toFixed(1), right = x(step + 0.5).toFixed(1);
        if (layer.steps[i - 1] !== step - 1) path += `M${left} ${low}`;
        path += `V${y(bottom[i]).toFixed(1)}H${right}`;
        back = `V${low}H${left}${back}`;
        if (layer.steps[i + 1] !== step + 1) { path += `${back}Z`; back = ""; }
      });
      svg("path", {class: `layer ${colourClass(layer.colour)}`, d: path}, picture);
    }
  }

  function nearest(own, event) {
    const place = event.clientX - own.picture.getBoundingClientRect().left;
    let best = null, distance = Infinity;
    for (const step of steps) {
      // A warning wins over its neighbours, which may be closer than a pointer can tell.
      const away = Math.abs(own.x(step) - place) - (marked.has(step) ? NEAR : 0);
      if (away < distance) { best = step; distance = away; }
    }
    return best;
  }

  function key(own, event) {
    const stops = event.shiftKey ? steps.filter((step) => marked.has(step)) : steps;
    const current = own.step ?? steps[steps.length - 1];
    let next;
    if (event.key === "ArrowRight") next = stops.find((step) => step > current);
    else if (event.key === "ArrowLeft") next = stops.filter((step) => step < current).pop();
    else if (event.key === "Home") next = steps[0];
    else if (event.key === "End") next = steps[steps.length - 1];
    else if (event.key === "Escape") return hide();
    else return;
    event.preventDefault();
    if (next !== undefined) { moveTo(own, next); announce(tip.text()); }
  }

  function moveTo(own, step) {
    if (step === null || step === undefined) return;
    own.step = step;
    if (!own.cursor) drawOne(own);
    moveCursors(step);
    const rows = [html("b", {}, `step ${step}`)];
    own.panel.lines.forEach((line, i) => {
      const value = own.known[i].get(step);
      if (value !== undefined) rows.push(html("div", {class: "row"}, html("span", {}, line.label || own.panel.title), html("span", {}, written(value))));
    });
    for (const text of marked.get(step) || []) rows.push(html("div", {class: "warning"}, text));
    tip.show(rows, () => {
      const box = own.picture.getBoundingClientRect();
      return {right: box.left + own.x(step), top: box.top + TOP, bottom: box.bottom - BOTTOM};
    });
  }

  function moveCursors(step) {
    for (const one of views.filter((each) => each.cursor)) {
      one.cursor.setAttribute("x1", one.x(step));
      one.cursor.setAttribute("x2", one.x(step));
      one.cursor.setAttribute("visibility", "visible");
    }
  }

  function hide() {
    tip.hide();
    for (const one of views) if (one.cursor) one.cursor.setAttribute("visibility", "hidden");
  }

  let waiting = 0, width = container.clientWidth;
  new ResizeObserver(() => {
    if (container.clientWidth === width) return;
    width = container.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }).observe(container);
  return {set, moveCursors, showStep: (step) => views.length && moveTo(views[0], step), hide};
}
