"""Prompts in several scripts, code, emoji, and one of more than 400 tokens."""

from __future__ import annotations

PROMPTS = {
    "english": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "chat": "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "french": "Les élèves étudient à l'école, où le professeur leur a déjà expliqué que",
    "german": "Die Größe der Stadt überraschte ihn; über den Dächern",
    "russian": "Москва — столица России. Самая длинная река в стране —",
    "greek": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και",
    "arabic": "القاهرة هي عاصمة مصر، وتقع على نهر",
    "hindi": "दिल्ली भारत की राजधानी है और",
    "chinese": "北京是中国的首都。长江是",
    "japanese": "東京は日本の首都であり、富士山は",
    "korean": "서울은 대한민국의 수도이며, 한강은",
    "emoji": "Weather today: ☀️🌤️ then 🌧️⛈️! My mood: 😀👍🏽 👩‍👩‍👧‍👦 and",
    "python": 'def fibonacci(n: int) -> list[int]:\n    """Return the first n numbers."""\n    numbers = [0, 1]\n',
    "json": '{"name": "myelin", "stages": [{"index": 0, "layers": [0, 15]}, {"index": 1, "layers": [15,',
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "whitespace": "  leading spaces\n\n\n\ttabs\tand   gaps \r\n and a trailing newline\n",
    "long": (
        "The nerve fibres of vertebrates are wrapped in a fatty sheath called myelin. It is laid down in segments "
        "by cells that wind themselves around the fibre many times, and between two segments a short stretch stays "
        "bare. A signal does not creep along the membrane of such a fibre; it leaps from one bare stretch to the "
        "next, and so it arrives many times sooner than it would otherwise, at a fraction of the cost. When the "
        "sheath is damaged, signals are late, or garbled, or lost, although the fibre itself may be sound.\n\n"
        "A chain of machines that computes a language model together is in a similar position. Each machine holds "
        "a few of the model's layers. A token enters at the head, is turned into a vector of numbers, and this "
        "vector is passed from machine to machine, each of which changes it a little, until the last one turns it "
        "into the choice of the next token. The numbers that cross from one machine to another are few; what "
        "matters is how soon they arrive. If every token had to travel back to a distant coordinator before the "
        "next could begin, then the chain would spend most of its time waiting. It is better to close the loop "
        "where the tokens are needed: the tail tells the head directly which token was chosen, and the coordinator "
        "merely listens.\n\n"
        "There is a second likeness. When one segment of the sheath is lost, the body can sometimes replace it, "
        "and the fibre conducts again. When one machine of the chain is lost, its layers can be loaded on another "
        "one, the two neighbours can be connected to it, and the text that had been produced so far can be fed in "
        "again. The reader sees a pause and then the sentence goes on, word for word as it would have. For that to "
        "be true, the choice of each token must depend on nothing but the text before it: not on which other "
        "readers are being served at the same moment, not on how the text was cut into pieces, and not on where "
        "the layers happen to be.\n\n"
        "In short, the three rules of such a chain are these. First,"
    ),
}
