// While `dualres report --watch` runs, the page reloads its own file and looks as before. history.state outlives a reload,
// and the browser restores the position in the page.

const seconds = Number(document.documentElement.dataset.refresh ?? 0);
if (history.state) restore(history.state);
if (seconds) {
  document.getElementById("updated").textContent = ` Last change: ${new Date(document.lastModified).toLocaleTimeString()}.`;
  setTimeout(() => {
    history.replaceState(current(), "");
    location.reload();
  }, 1000 * seconds);
}

function current() {
  return {
    hidden: buttons().filter((button) => button.getAttribute("aria-pressed") === "false").map(label),
    open: [...document.querySelectorAll("details[open]")].map(label),
    focus: document.activeElement && document.activeElement !== document.body ? label(document.activeElement) : "",
    tables: [...document.querySelectorAll(".scroll")].map((box) => box.scrollLeft),
  };
}

function restore(before) {
  history.replaceState(null, "");
  for (const button of buttons()) if (before.hidden.includes(label(button))) button.click();
  for (const details of document.querySelectorAll("details")) details.open = before.open.includes(label(details));
  const focused = [...document.querySelectorAll("a, button, summary, [tabindex]")].find((each) => label(each) === before.focus);
  focused?.focus({ preventScroll: true });
  document.querySelectorAll(".scroll").forEach((box, number) => (box.scrollLeft = before.tables[number] ?? 0));
}

function buttons() {
  return [...document.querySelectorAll(".legend th button")];
}

/** A name that the element still has after a reload. */
function label(element) {
  const name = element.getAttribute("aria-label") ?? (element.querySelector("summary") ?? element).textContent;
  return `${element.tagName} ${element.closest("figure")?.id} ${name}`;
}
