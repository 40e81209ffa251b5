// The step over time, with what a GPU holds at the same moments. There is no server: all bars are in the page.
const section = document.querySelector("#step"), step = JSON.parse(document.querySelector("#step-data").textContent);
section.hidden = false;
document.body.classList.add("live");
const held = new Memory(section.querySelector(".plot"), time => view.mark(time));
const view = new Timeline(section, { more: () => {}, picked: () => {}, moved: window => held.look(window), at: time => held.mark(time) });
section.querySelector("h3").textContent = `What a GPU of ${step.memory.name} holds; room for tensors: ${gigabytes(step.memory.room)}`;
view.show(step);
held.show(step.memory, step.step, view.window, view.names);
