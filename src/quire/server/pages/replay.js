// The controls of a replay (`quire replay FILE --view`): play, pause, step, speed and position.

import { byId, request } from "./dom.js";

let shown = null; // the state of the replay, as the server sent it last
let wanted = null; // a position that was chosen and not sent yet
let sending = false;

/** Show where the replay stands; undefined: this is a live engine. */
export function showReplay(replay) {
  shown = replay ?? null;
  byId("replay").hidden = shown === null;
  if (shown === null) return;
  byId("pause").hidden = true;
  for (const link of document.querySelectorAll("header a")) link.hidden = true;
  byId("model").textContent = shown.name;
  const ended = shown.position >= shown.num_steps;
  byId("play").textContent = shown.playing ? "Pause" : ended ? "Play again" : "Play";
  byId("back").disabled = shown.target === 0;
  byId("forward").disabled = shown.target >= shown.num_steps;
  byId("position").max = shown.num_steps;
  if (wanted === null) byId("position").value = shown.playing ? shown.position : shown.target;
  byId("speed-choice").value = String(shown.speed);
  const seeking = !shown.playing && shown.position !== shown.target ? `, going to ${shown.target.toLocaleString("en")}` : "";
  const text = `${shown.position.toLocaleString("en")} of ${shown.num_steps.toLocaleString("en")} steps${seeking}`;
  byId("position-text").textContent = text;
  byId("position").setAttribute("aria-valuetext", text);
}

/** Let the controls work: the server sends the state after each; `failed` shows a sentence. */
export function bindReplay(failed) {
  /** Where a step on or back begins: a position that was chosen may not be sent or reached yet. */
  const from = () => wanted ?? (shown.playing ? shown.position : shown.target);
  const send = async (change) => {
    try {
      showReplay(await (await request("replay", { body: change })).json());
    } catch (error) {
      failed(error.message);
    }
  };
  /** Positions come faster than they are sent, while the slider is moved: the last one counts. */
  const seek = async (position) => {
    wanted = position;
    if (sending) return;
    sending = true;
    while (wanted !== null) {
      const next = wanted;
      await send({ position: next, playing: false });
      if (wanted === next) wanted = null;
    }
    sending = false;
  };
  byId("play").addEventListener("click", () => send({ playing: !shown.playing }));
  byId("back").addEventListener("click", () => seek(Math.max(from() - 1, 0)));
  byId("forward").addEventListener("click", () => seek(from() + 1));
  byId("position").addEventListener("input", () => seek(Number(byId("position").value)));
  byId("speed-choice").addEventListener("change", () => send({ speed: Number(byId("speed-choice").value) }));
}
