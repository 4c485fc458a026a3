// Interaction: hide and show curves, read them with a crosshair. chart.js, which precedes this file, draws.

const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 };

for (const chart of JSON.parse(document.getElementById("charts").textContent)) {
  show(document.getElementById(chart.name), chart);
}
const compared = JSON.parse(document.getElementById("rows").textContent);
if (compared.length) document.querySelector("#comparison ~ .scroll").after(element("p", { class: "script" }, download("comparison", () => compared)));
openWhilePrinting(document.querySelectorAll("details"));

/** Fill one figure. All mutable state is here: hidden curves, the crosshair, and the current frame. */
function show(figure, chart) {
  const hidden = new Set();
  let tokens = null; // position of the crosshair; null: none, and the table has the last values
  let chosen = null; // the curve whose button has the pointer or focus
  let frame = null;
  const svg = shape("svg", { tabindex: 0, role: "slider", "aria-label": `${figure.dataset.title}, by tokens` });
  const plot = element("div", { class: "plot" }, svg);
  const rows = chart.series.map((series) => row(series));
  const heading = element("caption");
  figure.append(element("div", { class: "panel" }, plot, legend(chart, heading, rows, toggle)));

  new ResizeObserver(() => plot.clientWidth !== frame.width && draw()).observe(plot);
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => look(under(event, svg, frame)));
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && look(null));
  svg.addEventListener("blur", () => look(null));
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return look(null);
    if (!(event.key in STEPS) || visible().length === 0) return;
    event.preventDefault();
    look(moved(visible(), tokens, STEPS[event.key]));
  });
  rows.forEach(({ button }, number) => {
    const series = chart.series[number];
    button.addEventListener("click", () => toggle([series], hidden.has(series)));
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && emphasize(series));
    button.addEventListener("focus", () => button.matches(":focus-visible") && emphasize(series)); // not by touch
    for (const kind of ["pointerleave", "blur"]) button.addEventListener(kind, () => emphasize(null));
  });
  draw();

  function visible() {
    return chart.series.filter((series) => !hidden.has(series));
  }

  function toggle(changed, on) {
    for (const series of changed) on ? hidden.delete(series) : hidden.add(series);
    draw();
  }

  function emphasize(series) {
    chosen = series;
    const strong = hidden.has(series) ? undefined : series?.name;
    svg.classList.toggle("dimmed", strong !== undefined);
    for (const group of svg.querySelectorAll(".series")) group.classList.toggle("strong", group.dataset.name === strong);
  }

  function draw() {
    frame = framed(chart, visible(), plot.clientWidth, frame);
    svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const curves = visible().map((series) => curve(series, frame));
    const inside = shape("g", { "clip-path": `url(#${chart.name}-clip)` }, ...reference(chart, frame), ...curves);
    svg.replaceChildren(clip(chart, frame), ...axes(chart, frame), inside, shape("g", { class: "cross" }));
    emphasize(chosen);
    look(tokens);
  }

  function look(wanted) {
    const shown = visible();
    tokens = wanted === null || shown.length === 0 ? null : snapped(shown, wanted);
    const where = tokens ?? Math.max(0, ...shown.map((series) => series.x.at(-1)));
    const found = chart.series.map((series) => (hidden.has(series) ? null : valueAt(series, where)));
    const best = Math.min(...found.map((value) => value?.mean ?? Infinity));
    heading.textContent = `at ${where.toLocaleString("en")} tokens`;
    rows.forEach((each, number) => each.fill(found[number], !hidden.has(chart.series[number]), best));
    svg.querySelector(".cross").replaceChildren(...(tokens === null ? [] : cross(chart, found, tokens, frame)));
    svg.setAttribute("aria-valuemax", frame.end);
    svg.setAttribute("aria-valuenow", where);
    svg.setAttribute("aria-valuetext", spoken(chart, found, where));
  }
}

/** The table next to the curves: a swatch, a button to hide the curve, its value at the crosshair. */
function legend(chart, heading, rows, toggle) {
  const every = (text, on) => {
    const button = element("button", { type: "button", class: "every" }, text);
    button.addEventListener("click", () => toggle(chart.series, on));
    return button;
  };
  const range = chart.series.some((series) => series.low) ? "range" : "";
  const head = ["method", "mean", range].map((text) => element("th", { scope: "col" }, text));
  const table = element("table", {}, heading, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows.map((each) => each.line)));
  return element("div", { class: "legend" }, table, element("p", {}, every("show all", true), every("hide all", false), download(chart.name, () => points(chart))));
}

function row(series) {
  const button = element("button", { type: "button", "aria-pressed": "true" }, swatch(series), element("span", {}, series.name));
  const mean = element("td");
  const range = element("td");
  const line = element("tr", {}, element("th", { scope: "row" }, button), mean, range);
  const fill = (value, on, best) => {
    button.setAttribute("aria-pressed", String(on));
    line.classList.toggle("off", !on);
    mean.textContent = value ? value.mean.toFixed(4) : "";
    mean.classList.toggle("best", value !== null && value.mean === best);
    range.textContent = value && series.low ? `${value.low.toFixed(3)}–${value.high.toFixed(3)}` : "";
  };
  return { button, line, fill };
}

function spoken(chart, found, tokens) {
  const values = found.flatMap((value, number) => (value ? [`${chart.series[number].name} ${value.mean.toFixed(4)}`] : []));
  return `${tokens.toLocaleString("en")} tokens: ${values.join(", ") || "all curves are hidden"}`;
}

/** The value of a curve at a token count; null before its start and after its end. */
function valueAt(series, tokens) {
  const apart = series.x.length > 1 ? series.x[1] - series.x[0] : 0;
  if (tokens < series.x[0] - apart || tokens > series.x.at(-1) + apart) return null;
  const at = nearest(series.x, tokens);
  return { mean: series.mean[at], low: series.low?.[at], high: series.high?.[at] };
}

function snapped(shown, tokens) {
  const near = shown.map((series) => series.x[nearest(series.x, tokens)]);
  return near.reduce((a, b) => (Math.abs(b - tokens) < Math.abs(a - tokens) ? b : a));
}

/** Where a key moves the crosshair: by a hundredth of the longest curve. */
function moved(shown, tokens, steps) {
  const all = shown.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
  const from = tokens === null ? all.length - 1 : nearest(all, tokens);
  const to = from + steps * Math.max(1, Math.round(all.length / 100));
  return all[Math.min(Math.max(to, 0), all.length - 1)];
}

function nearest(sorted, wanted) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > wanted) high = middle;
    else low = middle;
  }
  return wanted - sorted[low] <= sorted[high] - wanted ? low : high;
}

function under(event, svg, { x, width }) {
  const box = svg.getBoundingClientRect();
  return x.back(((event.clientX - box.left) / box.width) * width);
}

/** For browsers that cannot expand <details> by style alone. */
function openWhilePrinting(folded) {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...folded].filter((details) => !details.open);
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
}
