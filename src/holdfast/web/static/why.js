// A question that takes long: its progress, until the answer is there; then the page is loaded again, and has it.

const answer = document.getElementById("answer");

async function look() {
  const told = await (await fetch(`/api${location.pathname}${location.search}`)).json();
  if (told.job?.state !== "running") { location.reload(); return; }
  const now = told.job.progress;
  if (now) {
    const bar = document.getElementById("progress");
    bar.max = now.total;
    bar.value = now.done;
    document.getElementById("progress-said").textContent = `${now.what}: ${now.done.toLocaleString("en")} of ${now.total.toLocaleString("en")}`;
  }
  setTimeout(look, 300);
}

if (answer?.dataset.state === "running") setTimeout(look, 300);
