"""Everything that is no exact task: greetings, what it can do, and what it cannot.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from random import Random

from minisgl.tiny.data import Turn, fill, number, pick_style
from minisgl.tiny.phrases import CANNOT, SMALL_TALK, STRANGE, compose, expand, is_held_out
from minisgl.tiny.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COMMON,
    FRUITS,
    NAMES,
    OPEN_WORDS,
    PEOPLE,
    THINGS,
    any_word,
    letters,
    pseudo_word,
    sentence,
)

WORLD = """Hola, ¿cómo estás?|¿Qué hora es?|Cuéntame algo|¿Dónde está la biblioteca?
Buenos días amigo
Bonjour, comment ça va ?|Quelle heure est-il ?|Où est la gare ?|Je voudrais un café|Merci beaucoup
Guten Tag, wie geht es dir?|Wie spät ist es?|Was kannst du?|Ich möchte ein Bier|Wo ist der Bahnhof?
Ciao, come stai?|Dove si trova il museo?|Vorrei una pizza|Che tempo fa oggi?|Buona sera a tutti
Olá, tudo bem?|Onde fica a praia?|Quero um café|Qual é o seu nome?|Bom dia
Привет, как дела?|Где находится вокзал?|Сколько времени?|Расскажи мне что-нибудь|Спасибо
你好,你能做什么?|今天天气怎么样?|给我讲个笑话|你叫什么名字?|我想学习中文
こんにちは、元気ですか?|今何時ですか?|東京はどこですか?|ありがとう|寿司が食べたい
안녕하세요|오늘 날씨 어때요?|이름이 뭐예요?|मुझे हिंदी आती है|नमस्ते, आप कैसे हैं?
مرحبا، كيف حالك؟|ما اسمك؟|أين المحطة؟|שלום, מה שלומך?|Γεια σου, τι κάνεις;
Hej, hur mår du?|Hvor er toget?|Cześć, jak się masz?|Merhaba, nasılsın?|Xin chào bạn|Habari yako?
🙂🙂🙂|🦊?|❤️|👍|🎉🎉|¯\\_(ツ)_/¯|???|!!!|...|:-)|;)|<3|---|@@@|#1|$$$|%%|~~~""".replace(
    "\n", "|"
).split("|")


def subject(rng: Random) -> str:
    """What a question that we cannot answer may be about."""
    pools = (NAMES, CITIES, ANIMALS, FRUITS, THINGS, PEOPLE, OPEN_WORDS, COMMON, COMMON)
    words = [
        rng.choice(rng.choice(pools)) if rng.random() < 0.8 else pseudo_word(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
    ]
    if rng.random() < 0.2:
        words.insert(0, rng.choice(ADJECTIVES))
    return " ".join(words)


def nonsense(rng: Random) -> str:
    """Words, letters, signs or foreign text without any request in it."""
    kind = rng.random()
    if kind < 0.35:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 12)))
    if kind < 0.5:
        return " ".join(sentence(rng, rng.randint(3, 10)) for _ in range(rng.randint(1, 4)))
    if kind < 0.65:
        return " ".join(letters(rng, 1, 10) for _ in range(rng.randint(1, 4)))
    if kind < 0.75:
        first = rng.choice(
            (0x21, 0xC0, 0x400, 0x5D0, 0x620, 0x900, 0x3040, 0x4E00, 0xAC00, 0x1F300)
        )
        return "".join(chr(first + rng.randrange(90)) for _ in range(rng.randint(1, 12)))
    return rng.choice(WORLD)


def strange(rng: Random) -> Turn:
    """A request that the model cannot fulfil, and its answer to it."""
    style = pick_style(rng)
    if rng.random() < 0.25:
        question = style(nonsense(rng))
    else:
        operands = [subject(rng), subject(rng), str(number(rng)), str(number(rng))]
        question = fill(rng, compose(rng, STRANGE, ""), style, *operands).strip()
    if rng.random() < 0.12:
        question += rng.choice((" ", "\n", ", ")) + nonsense(rng)
    return Turn("cannot", question, CANNOT, f"cannot {question}".lower())


def small_talk(rng: Random) -> Turn:
    """A greeting, a thank-you, or a question about the model itself."""
    answer, patterns = rng.choice(SMALL_TALK)
    return Turn("talk", fill(rng, expand(rng, rng.choice(patterns)), pick_style(rng)), answer)


def draw_strange(rng: Random, held_out: bool = False) -> Turn:
    """A request that the model cannot fulfil, from the wanted split."""
    while True:
        turn = strange(rng)
        if is_held_out(turn.key) == held_out:
            return turn
