// How a diff is shown: inline, or side by side. The choice stays for this browser.

const diff = document.getElementById("diff");
const sides = document.getElementById("sides");

function show(how) {
  diff.dataset.sides = how;
  for (const one of sides.querySelectorAll("input")) one.checked = one.value === how;
}

sides.addEventListener("change", (event) => {
  show(event.target.value);
  try { localStorage.setItem("holdfast-sides", event.target.value); } catch { /* then it is for this page only */ }
});
let kept = null;
try { kept = localStorage.getItem("holdfast-sides"); } catch { /* as above */ }
show(kept === "beside" && innerWidth > 700 ? "beside" : "inline");
