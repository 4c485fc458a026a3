"use strict";
// Draws a chart: frame, axes and curves as SVG elements, from data and sizes alone.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 10, right: 14, bottom: 42, left: 58 };
const EARLY = 1 / 5; // of the tokens: the initial drop, which the vertical axis leaves out
const DOT = 2.5;

/** Sizes and scales. The vertical axis fits the visible curves, and stays as it was when all are hidden. */
function framed(chart, shown, wide, before) {
  const width = Math.max(wide, 240);
  const height = Math.round(Math.min(Math.max(0.6 * width, 260), 480));
  const end = Math.max(1, ...chart.series.map((series) => series.x.at(-1)));
  const domain = shown.length === 0 && before ? before.domain : heights(shown, chart.reference);
  const x = scale([0, end], [MARGIN.left, width - MARGIN.right]);
  const y = scale(domain, [height - MARGIN.bottom, MARGIN.top]);
  return { width, height, end, domain, x, y };
}

function heights(shown, reference) {
  const start = EARLY * Math.max(...shown.map((series) => series.x.at(-1)));
  const values = reference === null ? [] : [reference];
  for (const series of shown) {
    const late = (_, number) => series.x[number] >= start;
    for (const part of [series.mean, series.low ?? [], series.high ?? []]) values.push(...part.filter(late));
    values.push(...series.points.filter(([tokens]) => tokens >= start).map(([, value]) => value));
  }
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = 0.05 * (high - low) + 1e-3;
  return values.length ? [low - room, high + room] : [0, 1];
}

function curve(series, { x, y }) {
  const line = path(series.x.map(x), series.mean.map(y));
  const group = shape("g", { class: `series c${series.color} s${series.style}`, "data-name": series.name });
  if (series.low) group.append(shape("path", { class: "band", d: around(series, x, y) }));
  group.append(shape("path", { class: "line casing", d: line }), shape("path", { class: "line", d: line }));
  for (const [tokens, value] of series.points) group.append(shape("circle", { cx: x(tokens), cy: y(value), r: DOT }));
  return group;
}

function around(series, x, y) {
  const there = path(series.x.map(x), series.high.map(y));
  const back = path([...series.x].reverse().map(x), [...series.low].reverse().map(y));
  return `${there}L${back.slice(1)}Z`;
}

function reference(chart, { x, y, end }) {
  if (chart.reference === null) return [];
  const height = y(chart.reference);
  return [shape("line", { class: "reference", x1: x(0), x2: x(end), y1: height, y2: height })];
}

function axes(chart, { x, y, width, height, end, domain }) {
  const bottom = height - MARGIN.bottom;
  const across = ticks([0, end], width / 90);
  const up = ticks(domain, height / 50);
  const digits = Math.max(0, -Math.floor(Math.log10(up.step)));
  return [
    ...up.values.map((value) => shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) })),
    ...up.values.map((value) => text(value.toFixed(digits), { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" })),
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    ...across.values.map((value) => text(short(value), { x: x(value), y: bottom + 16, "text-anchor": "middle" })),
    text("tokens", { x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 6, "text-anchor": "middle" }),
    text(chart.unit, { x: -(MARGIN.top + bottom) / 2, y: 13, "text-anchor": "middle", transform: "rotate(-90)" }),
  ];
}

function clip(chart, { width, height }) {
  const box = { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.left - MARGIN.right + 2 * DOT, height: height - MARGIN.top - MARGIN.bottom };
  return shape("clipPath", { id: `${chart.name}-clip` }, shape("rect", box));
}

function cross(chart, found, tokens, { x, y, height, domain }) {
  const line = shape("line", { x1: x(tokens), x2: x(tokens), y1: MARGIN.top, y2: height - MARGIN.bottom });
  const dots = found.flatMap((value, number) => {
    const inside = value && value.mean >= domain[0] && value.mean <= domain[1];
    return inside ? [shape("circle", { class: `c${chart.series[number].color}`, cx: x(tokens), cy: y(value.mean), r: 1.5 * DOT })] : [];
  });
  return [line, ...dots];
}

function swatch(series) {
  const parts = ["line casing", "line"].map((kind) => shape("path", { class: kind, d: "M1 6H27" }));
  return shape("svg", { class: `swatch c${series.color} s${series.style}`, viewBox: "0 0 28 12", "aria-hidden": "true" }, ...parts);
}

function scale([from, to], [start, stop]) {
  const there = (value) => start + ((value - from) / (to - from)) * (stop - start);
  there.back = (place) => from + ((place - start) / (stop - start)) * (to - from);
  return there;
}

function ticks([low, high], most) {
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  const values = [];
  for (let number = Math.ceil(low / step); number * step <= high; number++) values.push(number * step);
  return { step, values };
}

function path(across, up) {
  return `M${across.map((x, number) => `${x.toFixed(1)} ${up[number].toFixed(1)}`).join("L")}`;
}

function short(tokens) {
  const [size, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([size]) => tokens >= size) ?? [1, ""];
  return `${Number((tokens / size).toPrecision(3))}${letter}`;
}

function text(words, attributes) {
  return shape("text", attributes, words);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
