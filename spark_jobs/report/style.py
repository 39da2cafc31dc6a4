"""How a report looks, and its few lines of script; both stand in the page itself.

Colours have names that say what they are for. Texts have a contrast of at least 4.5 against what
they stand on, marks in charts at least 3, in both palettes (WCAG 2.2, 1.4.3 and 1.4.11).
"""

from collections.abc import Mapping
from typing import Final

LIGHT: Final = {
    "paper": "#ffffff",
    "panel": "#f4f6f8",
    "text": "#1b1f24",
    "muted": "#57606a",
    "line": "#d0d7de",
    "link": "#0a53be",
    "good": "#0f766e",
    "bad": "#b42318",
    "committed": "#0f766e",
    "rolled_back": "#b45309",
    "parked": "#7c3aed",
    "pending": "#64748b",
}
DARK: Final = {
    "paper": "#0d1117",
    "panel": "#171c24",
    "text": "#e6edf3",
    "muted": "#9da7b3",
    "line": "#3d444d",
    "link": "#79b8ff",
    "good": "#2dd4bf",
    "bad": "#ff8f85",
    "committed": "#2dd4bf",
    "rolled_back": "#f59e0b",
    "parked": "#a78bfa",
    "pending": "#94a3b8",
}
TEXTS: Final = ("text", "muted", "link", "good", "bad")  # colours that texts have
MARKS: Final = ("committed", "rolled_back", "parked", "pending", "bad")  # and parts of charts
GROUNDS: Final = ("paper", "panel")


def _variables(palette: Mapping[str, str]) -> str:
    return "".join(f"--{name.replace('_', '-')}:{colour};" for name, colour in palette.items())


# No element has a style of its own: the policy of the page allows this one sheet and nothing else.
STYLE: Final = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}\n"
    """\
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-padding-top:.5rem}
body{margin:0 auto;max-width:64rem;padding:1rem;background:var(--paper);color:var(--text);
 font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;
 overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.2;margin:.2rem 0 .4rem}
h2{font-size:1.2rem;margin:2rem 0 .5rem;border-top:1px solid var(--line);padding-top:1rem}
h3{font-size:1.05rem;margin:1.5rem 0 .3rem}
h4{font-size:1rem;margin:0}
a{color:var(--link)}
p{margin:.4rem 0}
.verdict{font-size:1.15rem;font-weight:600}
.good{color:var(--good)}
.bad{color:var(--bad)}
.note,figcaption,.axis{color:var(--muted);font-size:.875rem}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:.8rem 0 0;padding:0}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .8rem;margin:.6rem 0}
dl.facts dt{color:var(--muted)}
dl.facts dd,dl.tiles dd{margin:0;min-width:0}
dl.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0}
dl.tiles div{background:var(--panel);border-radius:.4rem;padding:.5rem .7rem}
dl.tiles dt{color:var(--muted);font-size:.875rem}
dl.tiles dd{font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums}
figure{margin:1.2rem 0;break-inside:avoid}
figure h3{margin-top:0}
svg.chart{display:block;width:100%;overflow:visible;margin:.6rem 0 0}
svg.axes{padding-left:2.9rem}
svg text{fill:var(--text);font-size:13px;font-family:inherit}
svg .axis{fill:var(--muted);font-size:12px}
svg .grid{stroke:var(--line);stroke-width:1}
svg .track{fill:var(--line)}
svg .step{fill:none;stroke:var(--pending);stroke-width:2;vector-effect:non-scaling-stroke}
svg .area{fill:var(--pending);fill-opacity:.2}
svg .span{stroke:var(--committed);stroke-width:3}
svg .tail{stroke:var(--committed);stroke-width:1.5}
svg .hollow{fill:var(--paper);stroke:var(--committed);stroke-width:2}
svg a:focus-visible rect{stroke:var(--text);stroke-width:2}
.committed{fill:var(--committed);background:var(--committed)}
.rolled-back{fill:var(--rolled-back);background:var(--rolled-back)}
.parked{fill:var(--parked);background:var(--parked)}
.pending{fill:var(--pending);background:var(--pending)}
.anomaly-mark{fill:var(--bad);background:var(--bad)}
ul.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:.3rem 0;padding:0;
 font-size:.875rem}
ul.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin-right:.35rem}
details{margin:.4rem 0}
summary{cursor:pointer;color:var(--link)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;margin:.4rem 0}
caption{text-align:left;color:var(--muted)}
th,td{text-align:right;padding:.15rem .9rem .15rem 0;border-bottom:1px solid var(--line);
 vertical-align:top;overflow-wrap:normal}
th.name,td.name{text-align:left;min-width:7rem;max-width:18rem;overflow-wrap:anywhere}
article{background:var(--panel);border-radius:.4rem;border-left:4px solid var(--bad);
 padding:.6rem .8rem;margin:.6rem 0;break-inside:avoid}
article:target{outline:3px solid var(--link)}
.dumps{display:flex;flex-wrap:wrap;gap:.4rem 1.6rem}
.dumps div{min-width:0}
pre,code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:.3rem 0;font-size:.72rem;line-height:1.35;white-space:pre-wrap}
form{display:flex;flex-wrap:wrap;gap:.4rem .8rem;align-items:end;margin:.6rem 0}
form label{font-size:.875rem;color:var(--muted)}
input,select{display:block;font:inherit;max-width:100%;color:var(--text);background:var(--paper);
 border:1px solid var(--muted);border-radius:.3rem;padding:.25rem .4rem}
[hidden]{display:none}
footer{margin-top:2.5rem;border-top:1px solid var(--line);padding-top:.6rem}
@media (max-width:36rem){.wide{display:none}}
@media print{
@page{margin:14mm}
body{max-width:none;padding:0;font-size:10pt}
nav,form{display:none}
a{color:inherit;text-decoration:none}
svg,.tiles div,article,i{print-color-adjust:exact;-webkit-print-color-adjust:exact}
h2,h3,h4,figcaption,.kind>.note{break-after:avoid}
section>details:not([open]){display:none}
article{break-inside:auto}
article dl,article pre{break-inside:avoid}
article summary{display:none}
.dumps{display:grid;grid-template-columns:repeat(auto-fill,minmax(13.5rem,1fr))}
.dumps .note{font-size:8pt;break-after:avoid}
.scroll{overflow:visible}
table{font-size:8pt}
tr{break-inside:avoid}
article details::details-content{content-visibility:visible;block-size:auto}
pre{font-size:7pt}
}
"""
)

# Adds a filter above the anomalies. The page is complete without it.
SCRIPT: Final = """\
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
  const told = document.createElement("output");
  form.append(told);
  const apply = () => {
    const wanted = text.value.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row, place) => {
      const ofKind = !kind.value || row.dataset.kind === kind.value;
      const fits = ofKind && texts[place].includes(wanted);
      row.hidden = !fits;
      shown += fits;
    });
    told.textContent = `${shown} of ${rows.length} shown`;
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
"""
