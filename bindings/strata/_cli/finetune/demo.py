"""`strata demo`: a fixed run of `strata finetune` that needs nothing but this machine.

A Llama of over 100 M parameters learns to tell tales from thousands that are made up by the rules
below, and then tells one that nobody wrote. Its parameters alone take 192 MiB in 16 bits, its whole
training state 1.3 GiB; the device may hold 192 MiB, for parameters, activations and PyTorch's own
memory together, and the optimizer's state rests on the disk.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

TALES = 4000
SSD_PATH = Path("runs/demo-ssd")
TALES_PATH = Path("runs/demo-tales/tales.jsonl")

# A paragraph is a rule, with its ways. One named in braces is followed there; what a tale has drawn
# for a name with a number stays for the tale, and another number never draws the same.
RULES = """
tale: {opening} {finding} {asking} {going} {ending}

opening: Once upon a time there was {one} {beast1} called {name1}, who lived {place1}.
    | {Place1} there lived {one} {beast1}. Everyone called her {name1}.
    | Long ago, {name1} the {beast1} lived {place1}, and she was {mood1} and {mood2}.

finding: One {time} {name1} went out for a walk, and {where1} she found a {thing1}.
    | One {time}, {where1}, {name1} saw something shine. It was a {thing1}.
    | Then one {time} the wind blew a {thing1} to her door.

asking: "Whose {thing1} can this be?" asked {name1}. "I will ask {name2} the {beast2}."
    | "What a {look1} {thing1}!" said {name1}. "I must show it to {name2} the {beast2}."
    | "I have never seen such a {look1} {thing1}," said {name1}, and she ran to {name2} the
    {beast2}.

going: But {name2} was {doing}. "Come in and have some {food1}," said {name2}, and she looked at
    the {thing1} for a long time.
    | "That {thing1} is mine!" cried {name2}. "I lost it when I was {doing}." And she gave
    {name1} some {food1}.
    | When {name2} saw the {thing1}, she laughed. "It belongs to the {star1}," she said. "Let us
    give it back." So they climbed up {high}, and {name1} threw the {thing1} into the sky.

ending: From that day on {name1} and {name2} were the best of friends.
    | That night they sat {place2}, ate {food2}, and told each other tales until the {star2} came
    up.
    | And if you walk {place2} when the {star2} is out, you can still hear {name1} and {name2}
    sing.

one: a little | a brave | a shy | a clever | a sleepy | a merry
mood: kind | curious | proud | lonely | quick | gentle
beast: fox | owl | hare | bear | mouse | heron | badger | otter
name: Lina | Mira | Tilda | Pip | Rosa | Nell | Fern | Olive
place: by the river | under the old oak | at the edge of the forest | behind the mill | by the sea
time: morning | evening | rainy day | winter night | day in spring
where: under a leaf | between two stones | beside the pond | in the tall grass
thing: lantern | bell | key | feather | spoon | mirror | kite | ring
look: beautiful | strange | tiny | golden | shiny
doing: baking bread | mending the roof | counting the clouds | picking apples
food: tea | honey cake | berry soup | warm bread | plum jam
star: moon | evening star | north star | sun
high: the highest tree | the tower | the mountain | a long ladder
"""


def rules() -> dict[str, list[str]]:
    """The ways of every rule."""
    found = re.findall(r"^(\w+): (.*(?:\n .*)*)", RULES, re.MULTILINE)
    return {name: [" ".join(way.split()) for way in ways.split("|")] for name, ways in found}


def tell(ways: dict[str, list[str]], draw: random.Random) -> str:
    """A tale."""
    drawn: dict[str, str] = {}

    def follow(match: re.Match[str]) -> str:
        name = match[1].lower()
        rule = name.rstrip("12")
        if name not in drawn:
            others = {text for other, text in drawn.items() if other.rstrip("12") == rule}
            way = draw.choice([way for way in ways[rule] if way not in others])
            drawn[name] = re.sub(r"{(\w+)}", follow, way)
        text = drawn[name]
        return text[0].upper() + text[1:] if match[1][0].isupper() else text

    return re.sub(r"{(\w+)}", follow, "{tale}")


def write_tales() -> None:
    """Those that the run reads; always the same."""
    draw, ways = random.Random(0), rules()
    TALES_PATH.parent.mkdir(parents=True, exist_ok=True)
    with open(TALES_PATH, "w") as file:
        file.writelines(json.dumps({"text": tell(ways, draw)}) + "\n" for _ in range(TALES))


def preset() -> dict[str, Any]:
    """The options of the run; any may be given to change it."""
    SSD_PATH.mkdir(parents=True, exist_ok=True)
    return {
        "model": "llama-110m",
        "vocabulary": 1024,
        "data": [TALES_PATH],
        "held_out": 0.02,
        "output": "runs/demo",
        "overwrite": True,
        "device_memory": "192MiB",
        "host_memory": "384MiB",
        "ssd_memory": "2GiB",
        "ssd_path": [SSD_PATH],
        "steps": 120,
        "batch": 4,
        "sequence": 256,
        "lr": 1e-3,
        "warmup": 10,
        "eval_every": 40,
        "eval_windows": 16,
        "prompt": "Once upon a time there was",
        "generate": 200,
    }
