// CSV files of the page's data, made by the browser: nothing is loaded.

/** A button that saves the rows of `collect`, objects with equal keys, as a file. */
function download(name, collect) {
  const button = element("button", { type: "button", class: "every" }, "download CSV");
  button.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([csv(collect())], { type: "text/csv" }));
    element("a", { href: url, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
  return button;
}

function csv(rows) {
  const lines = [Object.keys(rows[0]), ...rows.map(Object.values)];
  return lines.map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
}

function quoted(value) {
  if (typeof value !== "string") return String(value ?? "");
  const harmless = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value; // not a formula of a spreadsheet
  return /[",\r\n]/.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

/** The points of a chart: its lines with their range over seeds, and the values of individual runs. */
function points(chart) {
  return chart.series.flatMap(({ name, seeds, x, mean, low, high, points }) => {
    const row = (curve, tokens, value, low, high) => ({ scale: chart.title, method: name, seeds, curve, tokens, value, low, high });
    const line = x.map((tokens, at) => row(`${chart.unit}, moving average`, tokens, mean[at], low?.[at], high?.[at]));
    return [...line, ...points.map(([tokens, value]) => row("validation loss of a run", tokens, value))];
  });
}
