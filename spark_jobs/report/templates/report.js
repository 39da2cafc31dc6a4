// Adds a filter above the anomalies. The page is complete without it.
(() => {
  const rows = [...document.querySelectorAll("article[data-kind]")];
  const place = document.getElementById("filter");
  if (!place || rows.length < 2) return;
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const form = document.createElement("form");
  form.setAttribute("role", "search");
  const labelled = (text, field) => {
    const label = document.createElement("label");
    label.append(text, field);
    form.append(label);
    return field;
  };
  const text = labelled("Transaction, offset or text", document.createElement("input"));
  text.type = "search";
  const kind = labelled("Kind", document.createElement("select"));
  kind.append(new Option("all kinds", ""));
  for (const one of new Set(rows.map((row) => row.dataset.kind)))
    kind.append(new Option(one.replaceAll("_", " "), one));
  const count = document.createElement("output");
  form.append(count);
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row, place) => {
      const ofKind = !kind.value || row.dataset.kind === kind.value;
      const fits = ofKind && texts[place].includes(wanted);
      row.hidden = !fits;
      shown += fits;
    });
    count.textContent = `${shown} of ${rows.length} shown`;
    for (const group of document.querySelectorAll("section.kind"))
      group.hidden = !group.querySelector("article:not([hidden])") && (wanted || kind.value);
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  // A link to a row that is filtered out shows it again.
  addEventListener("hashchange", () => {
    const row = document.getElementById(location.hash.slice(1));
    if (row && row.closest("[hidden]")) { form.reset(); apply(); row.scrollIntoView(); }
  });
  place.append(form);
  apply();
})();
