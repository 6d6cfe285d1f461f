// Tables sort by a click on a heading; a second click turns the order around.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      const body = table.tBodies[0];
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const both = (a, b) => {
        const [one, other] = [key(a), key(b)];
        const order = one !== "" && other !== "" && !isNaN(one) && !isNaN(other)
          ? Number(one) - Number(other)
          : one.localeCompare(other, "en", { numeric: true });
        return down ? -order : order;
      };
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...[...body.rows].sort(both));
    });
  });
}
// On paper everything is open. Browsers that know ::details-content do that by the style sheet alone.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    addEventListener("afterprint", () => { details.open = false; }, { once: true });
  }
});
