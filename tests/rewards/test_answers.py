r"""What the built-in rewards say of answers whose truth is clear: boxed ones, marked ones, whole texts.

The tables come from a comparison of graders (F5 to F8). A case of `BOXED` is judged by `math`, and by `numeric` where
label and answer are numbers.
"""

from __future__ import annotations

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rewards.world import answer, rewarder

from myxa.algos.rewards.builtin import bind_builtin
from myxa.algos.rewards.extraction import accepted_labels, after_thought, read_answer
from myxa.core.completions import Completion

SIXTY = "123456789012345678901234567890123456789012345678901234567890"


def score(name: str, text: str, label: str, **args: Any) -> object:
    strip = {"strip_thinking": args.pop("strip_thinking")} if "strip_thinking" in args else {}
    one = Completion(group_id=0, index=0, messages=(), prompt="?", text=text, label=label)
    return bind_builtin(name, args=args, **strip)(one)


# (what is boxed, label, whether it is right)
NUMBERS = [
    ("42", "42", True), ("41", "42", False), ("42.", "42", True), ("42.0", "42", True), ("042", "42", True), ("+42", "42", True),
    ("-42", "42", False), ("42,", "42", True), ("7,", "7", True), ("7;", "7", True), (" 7 ", "7", True), ("$7$", "7", True),
    (r"\(7\)", "7", True), ("**7**", "7", True), ("{7}", "7", True), (r"\text{7}", "7", True), (r"\mathbf{7}", "7", True),
    ("\u22127", "-7", True), ("\u20137", "-7", True), ("\uff0d7", "-7", True), ("-\\,7", "-7", True), ("7\u00a0", "7", True),
    ("1,234", "1234", True), ("1{,}234", "1234", True), ("1{,}234", "234", False), (r"1\,234", "1234", True), (r"1\!234", "1234", True),
    (r"1,\!234", "1234", True), ("1\u00a0234", "1234", True), ("1\u2009234", "1234", True), ("1\u202f234\u202f567", "1234567", True),
    ("12,34", "1234", False), ("1.234.567", "1234567", True), ("1.234,5", "1234.5", True), ("1,234.5", "1234.5", True), ("4２", "42", True), ("1 000 000", "1000000", True), ("1'000", "1000", True), ("3,5", "3.5", True), ("41,42", "42", False), ("1,500", "1.5", False), ("USD 42", "42", True), (r"\text{€}42", "$42", False), ("42元", "42", True),
    ("0.5", "1/2", True), ("1/2", "0.5", True), (".5", "1/2", True), (r"\frac{1}{2}", "1/2", True), (r"\dfrac12", "1/2", True),
    (r"\tfrac12", "1/2", True), (r"\frac12", "0.5", True), (r"\frac1{2}", "1/2", True), (r"\frac{1}2", "1/2", True), ("½", "1/2", True),
    (r"-\frac{1}{2}", "-1/2", True), (r"\frac{-1}{2}", "-1/2", True), (r"\frac{1}{-2}", "-1/2", True), ("1⁄2", "1/2", True),
    ("1 1/2", "3/2", True), (r"1\frac{1}{2}", "3/2", True), (r"1\frac12", "3/2", True), (r"1\tfrac{1}{2}", "1/2", False), ("1½", "3/2", True),
    (r"-1\frac12", "-3/2", True), ("1 1/2", "1/2", False), ("11/2", "3/2", False), (r"2\frac{1}{2}", "1", False), ("3/2", "1 1/2", True),
    (r"0.\overline{3}", "1/3", True), (r"0.\overline{3}", "3/10", False), (r"0.1\overline{6}", "1/6", True), ("1/3", r"0.\overline{3}", True),
    ("6.02e23", r"6.02\times10^{23}", True), (r"6.02\times10^{23}", "6.02e23", True), (r"6.02\times 10^{23}", "23", False), ("6.02×10²³", "6.02e23", True),
    (r"6.02 \cdot 10^{23}", "6.02e23", True), (r"1.2\times10^3", "1200", True), ("1.2e3", "1200", True), (r"5\times10^{-3}", "0.005", True),
    (r"10^{6}", "1000000", True), ("2^{10}", "1024", True), ("2^{10}", "10", False), ("2^10", "1024", True), ("2**10", "1024", True),
    ("(-2)^3", "-8", True), ("5 million", "5000000", True), ("5 million", "5", False),
    ("x = 42", "42", True), ("x=42", "42", True), (r"x\,=\;5", "5", True), (r"\text{Area} = 42", "42", True), ("f(3) = 42", "42", True),
    (r"\angle ABC = 42^\circ", "42", True), ("1=42", "42", False), ("41=42", "42", False), (r"\boxed{42}", "42", True),
    ("5 m", "5 cm", False), (r"5\text{ m}", r"5\text{ cm}", False), (r"5\text{ cm}", r"5\text{ cm}", True), ("5 cm", r"5\text{ cm}", True),
    ("5", r"5\text{ cm}", True), (r"5\,\mathrm{cm}", "5", True), ("5 centimeters", "5 cm", True), (r"10\text{ cm}^2", "10", True),
    (r"10\text{ cm}^2", r"10\text{ cm}^3", False), ("10 square centimeters", r"10\text{ cm}^2", True), ("60 km/h", "60", True), ("60 km/h", "60 m/s", False),
    ("60 kilometers per hour", "60 km/h", True), ("3 hours", "3 minutes", False), ("7 apples", "7", True), ("90^\\circ", "90", True),
    ("90 degrees", r"90^\circ", True), ("90°", "90 rad", False), (r"5\,\mathrm{m\,s^{-1}}", "5 m/s", True), (r"5\,\mathrm{m\,s^{-1}}", "5 m s", False), (r"5\,\Omega", "5 Ω", True),
    (r"5\,\mu\text{m}", "5 μm", True), (r"8.3\ \mathrm{J/(mol\cdot K)}", "8.3", True), ("8.3 J/(mol·K)", "8.3 J/mol", False), ("٤٢", "42", True), ("१२٫५", "12.5", True), ("$5", "5", True), (r"\$5", "5", True), ("€5", "5", True), ("$5", "€5", False), ("5 dollars", "$5", True),
    ("5€", "5", True), ("50%", "50", True), (r"50\%", "50%", True), ("50 percent", "50%", True), ("50%", "0.5", True), ("50%", "5", False),
    (SIXTY, SIXTY, True), (SIXTY[:-1] + "1", SIXTY, False), ("1234568", "1234567", False), ("1234567.5", "1234567", False),
    ("41 or 42", "42", False), ("42 or 41", "42", False), ("not 42", "42", False), ("41, 42", "42", False), ("41 42", "42", False), ("(3,4)", "4", False),
    (r"2\sqrt{3}", "3", False), ("x^2", "2", False), ("10+3", "10", False), ("10+3", "3", False), ("5!", "5", False), ("3x", "3", False), ("2π", "2", False),
    (r"2\pi", "2", False), ("42 to 43", "43", False), ("between 41 and 42", "42", False), (r"\pm 42", "42", False), ("42i", "42", False), ("> 42", "42", False),
    (r"41 \text{ or } 42", "42", False), (r"\approx 43", "42", False), ("42-", "42", False), ("", "42", False), ("42?", "42", False), ("3t", "3", False),
    ("$5$ apples", "5", True), ("$5 to $6", "5", False), ("3rd", "3", True), (r"5^{\text{th}}", "5", True), (r"5\text{th}", "5", True), ("5 thousand", "5000", True),
    (r"\underline{5}", "5", True), (r"\textcolor{blue}{5}", "5", True), (r"\color{red}{-5}", "-5", True), (r"\fbox{5}", "5", True), ("5\\\\", "5", True), ("1_000", "1000", True), ("2516_8", "25168", False),
]  # fmt: skip


def test_b_f6_numeric_and_math_judge_the_whole_of_a_box() -> None:
    for boxed, label, is_right in NUMBERS:
        text = rf"It is 17, so \boxed{{{boxed}}} follows."
        assert (score("numeric", text, label), score("math", text, label)) == (is_right, is_right), (boxed, label)


def in_a_box(text: str, number: int | Fraction) -> object:
    return score("numeric", rf"\boxed{{{text}}}", str(number), tolerance=0)


@settings(max_examples=50)
@given(st.integers(-(10**30), 10**30), st.fractions(max_denominator=10**6))
def test_numbers_are_read_exactly_in_every_spelling(number: int, fraction: Fraction) -> None:
    for text in (str(number), f"{number:,}", f"{number}.0", f"${number}$", f" {number} %", f"{number}e0"):
        assert in_a_box(text, number) == 1.0
    assert score("numeric", f"we find that it is {number:,}.", str(number), tolerance=0) == 1.0
    over = f"{fraction.numerator}/{fraction.denominator}"
    assert (
        in_a_box(over, fraction)
        == in_a_box(rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}", fraction)
        == 1.0
    )


@settings(max_examples=50)
@given(st.text(st.sampled_from("0123456789.,-+eE/$%(){}\\frac \u2212x"), max_size=60))
def test_any_text_is_read_or_not_and_never_fails(text: str) -> None:
    for asked in (text, rf"\boxed{{{text}}}"):
        assert score("numeric", asked, "4") in (0.0, 1.0)


ALGEBRA = [
    ("x^2+1", "1+x^2", True), ("x^2+1", "x^2-1", False), ("(x+1)^2", "x^2+2x+1", True), (r"\sqrt{12}", r"2\sqrt{3}", True), (r"\sqrt 2", r"\sqrt{2}", True),
    (r"\sqrt{1764}", "42", True), (r"\frac{84}{2}", "42", True), ("5!", "120", True), (r"\binom{5}{2}", "10", True), (r"\log_2 8", "3", True),
    ("0.1000001", "0.1", False), (r"\{0.1000001, 2\}", r"\{0.1, 2\}", False), (r"\{2, 0.1\}", r"\{0.1, 2\}", True), ("0.5x", r"\frac{x}{2}", True),
    (r"2\pi\times10^{-9}", r"\pi\times10^{-9}", False), ("3.14159", r"\pi", False), ("3.1415926", r"\pi", False), (r"2\pi", r"\pi+\pi", True), ("1.5^2", "2.25", True),
    ("x>3", r"(3,\infty)", True), (r"(3,\infty)", "x>3", True), (r"x\ge 3", r"(3,\infty)", False), (r"x \geq 3", r"[3,\infty)", True), ("x<3", "x>3", False),
    (r"\{1,2\}", r"\{2,1\}", True), ("1,2", "2,1", True), ("(1,2)", "(2,1)", False), ("(1,2)", "(1,2)", True), ("(1,2)", "[1,2]", False),
    (r"x=3\text{ or }x=-3", r"3,-3", True), ("x=3", "3", True), ("y=2x+1", "2x+1", True), (r"6\times7=42", "42", True), (r"6\times 8=42", "42", False),
    (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}\text{ m}", False), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}", True), (r"\frac{\pi}{2}\text{ rad}", r"\frac{\pi}{2}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    (r"\text{even}", "even", True), (r"\text{even}", r"\text{odd}", False), ("A", "A", True), ("A", "B", False), ("x+1,", "x+1", True), ("-x", "x", False),
    (r"3\text{ mod }5", "3", False), ("x>3", "3", False), (r"\text{about }42", "42", False), (r"2\sqrt{3} cm", r"2\sqrt{3} m", False), (r"2\sqrt{3}\text{ apples}", r"2\sqrt{3}", True),
    ("√2", r"\sqrt{2}", True), ("2√3/3", r"\frac{2}{\sqrt{3}}", True), ("√(x+1)", r"\sqrt{x+1}", True), ("√2", "2", False), ("∛8", "2", True), ("x²+1", "x^2+1", True), ("x²", "x^3", False), ("π²/6", r"\frac{\pi^2}{6}", True),
    ("(−∞, 3]", r"(-\infty,3]", True), ("(-∞,1)∪(2,∞)", r"(-\infty,1)\cup(2,\infty)", True), ("x∈(1,2)", "(1,2)", True), (r"\varnothing", r"\emptyset", True), ("∅", r"\varnothing", True), ("a·b", "ab", True),
    (r"5:00 \text{ PM}", "5:00 PM", True), (r"5{:}00\text{ p.m.}", r"5:00\text{ p.m.}", True), ("5:00 PM", "5:00 AM", False), (r"\text{January 5}", "January 5", True), (r"\text{January 5}", "January 6", False),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}", False), (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}", False), (r"2^{-99}", r"\frac{1}{2^{99}}", True),
    (r"\frac{1}{3 \cdot 2^{2006}}", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", False), (r"\infty", r"-\infty", False), ("10+3", "13", True), (r"1-\frac{1}{2}", "0.5", True), ("x", "y", False), ("1/0 2i", r"\sin \infty", False), (r"\sin 1/0 \log \pi", "2516_8", False),
    *((a, b, is_right) for one, other, is_right in (
        (r"\frac{3\pi}{2}", "3pi/2", True), (r"\ln 2", "log(2)", True), ("e^{16}-1", "-1 + exp(16)", True), (r"\cos(2x)", "cos(2*x)", True), (r"\frac{x^2}{2}", "x**2/2", True),
        (r"\infty", "oo", True), (r"\theta/2", "theta/2", True), ("pi", "ip", False), (r"\frac{\sqrt3}{2}", "sqrt(3)/2", True), (r"4\sqrt(2)", r"4\sqrt{2}", True), (r"4\sqrt(2)", "4", False),
        (r"\sin 30^\circ", r"\frac12", True), (r"2\cos 20°", r"2\cos\frac{\pi}{9}", True), (r"\sin 30", r"\frac12", False),
        (r"2\sqrt{2}i", r"2i\sqrt{2}", True), ("(1+i)^2", "2i", True), (r"e^{i\pi}", "-1", True), ("3+4i", "3-4i", False),
        (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)", True), ("1<x<2 or 3<x<4", r"(1,2)\cup(3,4)", True), ("x>2, x<5", "(2,5)", True), ("x<2 or x>3", "(2,3)", False),
        (r"\frac{\pi}{4} + k\pi, k \in \mathbb{Z}", r"x = \frac{\pi}{4} + k\pi", True), (r"k\pi, k \in \mathbb{Z}", r"k\pi, k \in \mathbb{N}", False), (r"x \equiv 3 \pmod 7", "3", True),
        ("3 (mod 7)", r"3 \pmod{7}", True), ("3 (mod 7)", "3 (mod 5)", False), (r"f(x)=x \text{ for all } x", "f(x)=x", True), (r"10 \bmod 7", "10", False),
        (r"\textbf{(D)}\ 5", "5", True), (r"\textbf{(D)}\ 5", "D", True), (r"\text{(D) }5", r"\mathrm{(D)}\ 5", True), (r"\textbf{(D)}\ 5", "6", False), (r"\textbf{(D)}\ 5", "C", False), (r"\textbf{(C)}\ 5", r"\textbf{(D)}\ 5", False),
        ("2516", "2516_8", True), ("2516_7", "2516_{8}", False), ("2516_8", "25168", False), (r"\mathbb R", r"\mathbb{R}", True), ("True", "true", True), ("Tuesday", "Wednesday", False),
        ("12:30 PM", r"12\!:\!30\text{ p.m.}", True), ("2023-05-06", "2012", False), ("2023-05-06", "2023-05-06", True), ("10/12/2023", "5/6/2023", False), (r"\begin{cases} x=1\\ y=2\end{cases}", "x=1,y=2", True),
        (r"\langle 1,2\rangle", "(1,2)", True), ("1728", r"1331 \text{ and } 1728", False),
    ) for a, b in ((one, other), (other, one))),
]  # fmt: skip


def test_b_f5_math_judges_the_whole_of_a_box() -> None:
    for boxed, label, is_right in ALGEBRA:
        assert score("math", rf"It is 17, so $\boxed{{{boxed}}}$ follows.", label) == is_right, (boxed, label)


# (whole text, label, whether it is right); `math` and `numeric` agree
TEXTS = [
    ("<answer>7</answer>", "7", True), ("<answer> 7 </answer>", "7", True), ("<answer>$7$</answer>", "7", True), ("<ANSWER>\n7\n</ANSWER>", "7", True),
    ("<answer>1,234</answer>", "1234", True), ("<answer>6 7</answer>", "7", False), ("<think>2+5</think>\n<answer>7</answer>", "7", True), ("<answer>8</answer>", "7", False),
    (r"#### \frac12", "1/2", True), ("7+3=10\n#### 10\nbye", "10", True), ("#### 1,000", "1000", True), ("#### 41 or 42", "42", False), ("#### $5", "5", True),
    ("The answer is −7", "-7", True), ("The answer is 42.", "42", True), ("Answer: −42", "-42", True), ("Answer: 42.", "42", True), ("Answer: 042", "42", True),
    (r"Answer: \frac{84}{2}", "42", True), ("**Answer:** 42", "42", True), ("Answer: **42**", "42", True), ("Answer:\n\n\\[\n42\n\\]", "42", True),
    ("### Final Answer\n42", "42", True), ("The final answer is $42$. I hope it is correct.", "42", True), ("the answer is 41. No, the answer is 42.", "42", True),
    ("The answer is 42 because 6*7 = 42.", "42", True), ("The answer is 41 or 42.", "42", False), ("The answer is not 42.", "42", False),
    ("The answer is between 41 and 42.", "42", False), ("The answer is 7 apples.", "7", True), ("The answer is 42 (see above).", "42", True), ("The answer is 42, not 43.", "42", True), ("<answer>42", "42", True), ("The answer is 5 cm.", "5 m", False), ("It is 5 cm.", "5 m", False),
    ("Answer = 42", "42", True), ("Answer - 42", "42", True), ("answer: x = 42", "42", True), ("The answer to the question is 42", "42", True),
    ('{"answer": 42}', "42", True), ('{"answer": "41 or 42"}', "42", False),
    ("答案是42", "42", True), ("答案：42。", "42", True), ("答えは42です。", "42", True), ("정답은 42입니다.", "42", True), ("La réponse est 42.", "42", True),
    ("Die Antwort lautet 42.", "42", True), ("La respuesta es 42.", "42", True), ("Ответ: 42", "42", True),
    ("Antwort: 1.234.567", "1234567", True), ("La réponse finale est : 12", "12", True), ("答えは１８ドルです。", "18", True), ("答案是18元。", "18", True),
    ("답은 18입니다.", "18", True), ("Resposta: 18", "18", True), ("Respuesta final: 1 234", "1234", True), ("#### $18", "18", True), ("#### 18 dollars", "18", True),
    ("#### 5 cm", "5 m", False), ("The answer is 2.5 million.", "2.5", False), ("#### 1,080", "1080", True), ("The answer is 3 1/2.", "3.5", True),
    ("first 1, then 2, so 42", "42", True), ("42 and then 43", "42", False), ("so $x=42$", "42", True), (r"so \(x = 42\).", "42", True), ("none", "42", False), ("42", "42", True),
    ("1 1/2", "3/2", True), (r"\boxed{41} no, \boxed{42}", "42", True), (r"\boxed{42} no, \boxed{41}", "42", False), (r"\boxed {42}", "42", True), (r"\fbox{42}", "42", True),
    (r"$\boxed{\boxed{42}}$", "42", True), (r"\boxed{42}, as it is to be in \boxed{}.", "42", True), (r"It is 42: \boxed{}", "42", False), (r"\boxed{41} and the answer is 42", "42", False), (r"\boxed{42", "42", True),
    (r"Put it in \boxed{}. The answer is 42", "42", True), (r"The answer is $\boxed 42$.", "42", True), (r'{"answer": "\\boxed{42}"}', "42", True), (r"\framebox{42} or 43", "42", True),
    (r"\boxed{41} and \boxed{42}", "42", False), (r"$\boxed{42}$, $\boxed{42}$", "42", True), (r"\boxed{41}. So \boxed{42}", "42", True),
    ("The answer is 42, in total, so she wins.", "42", True), ("The answer is 41, 42", "42", False),
    (r"<think>maybe \boxed{42}</think> The answer is 41.", "42", False), (r"<think>maybe \boxed{42}</think> The answer is 41.", "41", True),
    (r"maybe \boxed{42}</think> The answer is 41.", "41", True), (r"maybe \boxed{42}</think> The answer is 41.", "42", False),
    ("<think>it is 42", "42", False), (r"<think>so \boxed{42}", "42", False), ("<think>a</think> 41 <think>42", "42", False), ("<think></think>42", "42", True),
    (r"[THINK]\boxed{41}[/THINK]\boxed{42}", "42", True), (r"<thinking>\boxed{41}</thinking>42", "42", True), ("<think>42</think>", "42", False),
    ("the solution set is what __import__('os').system('true') says: 41", "42", False), (" ".join(str(n) for n in range(60)), "42", False),
    ("".join(rf"\boxed{{{n}}} " for n in range(60)), "42", False),
]  # fmt: skip


def test_b_f5_whole_texts() -> None:
    for text, label, is_right in TEXTS:
        assert (score("numeric", text, label), score("math", text, label)) == (is_right, is_right), (text, label)


def test_answers_may_be_boxed_one_by_one() -> None:
    for text, label, is_right in (
        (r"$\boxed{2}$, $\boxed{3}$", "3,2", True), (r"\boxed{2} and \boxed{3}", "3", False), (r"\boxed{2}, and $\boxed{-2}$", r"\pm 2", True),
        (r"\boxed{2}\text{ or }\boxed{\frac{1}{2}}", r"\{0.5, 2\}", True), (r"\boxed{2}, \boxed{}", "2", True), (r"\boxed{1}, then $\boxed{2}$", "2", True),
    ):  # fmt: skip
        assert score("math", f"So {text}.", label) == is_right, text


def test_a_label_may_be_a_whole_solution_that_marks_its_answer() -> None:
    for label in (
        "48/2 = <<48/2=24>>24 clips.\n#### 42",
        "Answer: 42",
        r"so $x=\boxed{42}$, not 24",
        "The answer is 42.",
    ):
        for name in ("math", "numeric"):
            assert [score(name, text, label) for text in ("It is 42", r"\boxed{42}", "#### 24")] == [1.0, 1.0, 0.0], (
                label
            )


def test_b_f7_whole_numbers_are_met_exactly_and_others_within_a_millionth() -> None:
    for label, text, is_right in (
        ("1234567", "1234567.0", True), ("1234567", "1234568", False), ("0.1", "0.10000001", True), ("0.1", "0.101", False),
    ):  # fmt: skip
        assert score("numeric", rf"\boxed{{{text}}}", label) == is_right
    for tolerance, value in (({"tolerance": 1e-6}, 1.0), ({"absolute": 1.0}, 1.0), ({"tolerance": 0.0}, 0.0)):
        assert score("numeric", r"\boxed{1234568}", "1234567", **tolerance) == value, "for whole numbers too"


CHOICES = [
    ("A is correct here", "A"), ("E is the correct option", "E"), ("I think it's B", "B"), ("The answer is b", "B"), ("Answer - C", "C"), ("答案是B", "B"),
    ("答案：B。", "B"), ("正确答案为（C）", "C"), ("故选D", "D"), ("答えはＢです", "B"), ("정답은 C입니다", "C"), ("Die richtige Antwort ist B.", "B"), ("La réponse est la B.", "B"),
    ("La respuesta correcta es C.", "C"), ("answer is (B)", "B"), (r"Answer is: $\boxed{C}$", "C"), ("The answer is A. Wait, no: the answer is B.", "B"),
    ("Option C is right.", "C"), ("(D) is the best choice", "D"), ("I would go with C.", "C"), ("It must be B because the others fail", "B"), ("the answer is b because", "B"),
    ("Therefore, D.", "D"), ("The correct choice here is **E**.", "E"), ("Answer: option B", "B"), (r"\boxed{\text{(C) 5}}", "C"), ("<answer>B. Paris</answer>", "B"),
    ("My answer would be D", "D"), ("A, because it fits", "A"), ("La respuesta es la opción C", "C"), ("Lösung: C", "C"), ("my pick is C", "C"), ("Answer: [C]", "C"),
    ("The answer is neither A nor B, it is C.", "C"), ("A is incorrect; the answer is D", "D"), ("Answer: C\n\nA is wrong because of B", "C"), ("答案选C", "C"), ("Правильный ответ — C", "C"), ("A) x\nB) y\nThe correct option is B because A is not correct", "B"), ("<think>the answer is A</think> B", "B"),
    ("B", "B"), ("b", "B"), ("(B)", "B"), ("**B.**", "B"), ("B) Paris", "B"), (r"\boxed{\text{C}}", "C"),
    (r"$\mathbf{C}$", "C"), ("<answer>d</answer>", "D"), ("#### D", "D"), ("The answer is (B).", "B"),
    (r"The answer is \(\text{B}\)", "B"), ("Answer: A\nno, Answer: **C**", "C"), ("Final answer:\n\nB", "B"),
    ("A) x\nB) y\nThe correct option is B because A is not", "B"), ("A) x\nB) y\n\nB.\n", "B"),
    ("Option B is correct. Option A is wrong.", "B"), ("The correct answer is C. Option (D) describes another one.", "C"), ("I take option B because A is wrong.", "B"),
    ("I think it is (D)", "D"), ("The answer seems to be A.", "A"), ("The letter is C", "C"), ("<think>the answer is A</think> the answer is B", "B"),
    (r"the answer is A, no, \boxed{B}", "B"),
]  # fmt: skip


def test_b_f8_choices() -> None:
    for text, letter in CHOICES:
        assert [one for one in "ABCDE" if score("choice", text, one)] == [letter], text
        assert score("choice", text, f"({letter.lower()})") == 1.0, text


@pytest.mark.parametrize("text", [
    "The answer is a number that I cannot find", "A number of things", "I am not sure", "The answer is A or B.", r"\boxed{A or B}", r"\boxed{A, B}", "Answer: A, B, C",
    "<answer>A B</answer>", "It is a cat", "A is not correct", "Options B and C are correct.", "either B or C", "The answer is not B", "答案是A或B", "answer: A/B", "Both are Bad", "the answer is a lot", "<think>the answer is A",
    "A cat sat", "my choice: I go", "AB", "Answer is B's", "", "A) x\nB) y\nhm",
])  # fmt: skip
def test_b_f8_no_choice_was_made(text: str) -> None:
    assert [one for one in "ABCDEI" if score("choice", text, one)] == []


def test_words_are_read_by_the_same_rule() -> None:
    for text in (r"so \boxed{Paris}", "The answer is Paris.", "<answer>Paris</answer>", "<think>Rome?</think>Paris", "#### Paris", "Paris"):  # fmt: skip
        assert (score("exact", text, "Paris"), score("f1", text, "Paris")) == (1.0, 1.0), text
    assert score("exact", r"Paris or \boxed{Rome}", "Paris") == score("f1", r"Paris or \boxed{Rome}", "Paris") == 0.0
    assert score("exact", "so: Paris", "Paris") == 0.0
    assert score("exact", "The answer is Paris", "The answer is Paris") == 1.0


def test_a_pattern_is_looked_for_behind_the_thoughts_unless_it_speaks_of_them() -> None:
    def found(pattern: str, text: str, **more: Any) -> object:
        return bind_builtin("regex", pattern=pattern, **more)(
            Completion(group_id=0, index=0, messages=(), prompt="", text=text, label="42")
        )

    text = "<think>Answer: 42</think> Answer: 41"
    assert found(r"Answer: (\d+)", text) == 0.0
    assert found("42", text) == 0.0
    assert found("42", text, strip_thinking=False) == 1.0
    assert found(r"</think> Answer: 41", text) == 1.0


def test_b_f8_thoughts_may_be_left_in() -> None:
    text = r"<think>maybe \boxed{42}</think> The answer is 41."
    for name in ("numeric", "math"):
        assert score(name, text, "42", strip_thinking=False) == 1.0
    assert (after_thought("a</think>b"), after_thought("<think>a"), after_thought("a")) == ("b", None, "a")


@pytest.mark.parametrize(("name", "text", "labels", "value"), [
    ("exact", "Paris city", ["Paris", "Paris city"], 1.0), ("exact", "Rome", ["Paris", "Paris city"], 0.0), ("f1", "Paris city", ["Rome", "paris city"], 1.0),
    ("math", r"\boxed{x+1}", ["x", "1+x"], 1.0), ("math", r"\boxed{x+2}", ["x", "1+x"], 0.0), ("math", r"\boxed{2}", ["1", "2"], 1.0),
    ("numeric", r"\boxed{0.5}", ["2", "1/2"], 1.0), ("numeric", r"\boxed{3}", ["2", "1/2"], 0.0), ("choice", "B", ["A", "B"], 1.0), ("choice", "C", ["A", "B"], 0.0),
])  # fmt: skip
def test_any_of_several_accepted_labels_counts(name: str, text: str, labels: list[str], value: float) -> None:
    assert score(name, text, json.dumps(labels)) == value
    assert score(name, text, json.dumps(labels, separators=(",", ":"), ensure_ascii=False)) == value


def test_a_label_that_only_looks_like_a_list_is_a_label() -> None:
    for label in ("[1,2]", '["a', "[]", '{"target":', '{"target":[]}', '{"other":["a"]}', "a"):
        assert accepted_labels(label) == (label,)


def test_lists_of_other_kinds_are_read_too() -> None:
    assert accepted_labels('["a",1.10,"b"]') == ("a", "1.10", "b")
    assert accepted_labels('{"target":["Paris","Paris city"]}') == ("Paris", "Paris city")
    assert accepted_labels('{"target":"Paris"}') == ("Paris",)
    assert [score("numeric", text, "[7,8.5]") for text in ("7", "8.5", "9")] == [1.0, 1.0, 0.0]
    assert score("math", r"\boxed{[1,2]}", "[1,2]") == 1.0
    assert score("math", r"\boxed{2}", "[1,2]") == 0.0


HOSTILE = [
    "9^{9^{9^{9}}}", "9^9^9^9", "(10^9)!", "((10^8)!)!", "99999^{9999999}", r"\sqrt{" * 300 + "2" + "}" * 300, "{" * 3000 + "42" + "}" * 3000, "(" * 2000 + "42" + ")" * 2000,
    "1" * 200_000, "1," * 40_000, r"\sum_{n=1}^{1000000000} n^{n}", r"\int_0^1 x^{x^{x^{x}}} dx", r"\prod_{n=1}^{10^9} n", "9" * 1_000_000, r"\frac{" * 500, "2^{" * 200 + "2" + "}" * 200,
]  # fmt: skip


@pytest.mark.parametrize("boxed", HOSTILE, ids=range(len(HOSTILE)))
def test_b_f8_no_number_takes_long(boxed: str) -> None:
    begun = time.process_time()
    assert score("numeric", rf"\boxed{{{boxed}}}", "43") == 0.0
    assert time.process_time() - begun < 1.0


PIECES = (r"\boxed{", r"\boxed{1} ", "answer is ", "answer to ", "####", "<answer>", "</think>", "<think>", "$", "答案", "1 ", "it is ", "Answer: A or ", "(", "answer is((((((((", "\n", "B.", "{", "}", "\\")  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", PIECES)
def test_long_texts_are_read_in_linear_time(piece: str) -> None:
    text = piece * (80_000 // len(piece)) + "x"
    begun = time.process_time()
    read_answer(text)
    for name in ("numeric", "choice", "exact", "f1"):
        assert score(name, text, "9" if name == "numeric" else "Q") == 0.0
    assert time.process_time() - begun < 0.8
    if piece in PIECES[:3]:
        assert score("math", text, "99", seconds=1) == 0.0


@pytest.mark.timeout(90)
async def test_b_f8_nothing_takes_longer_than_its_seconds() -> None:
    async with rewarder("math", args={"seconds": 1}) as made:
        await made.score(answer(r"\boxed{x}", "x+1"))  # imports
        for boxed in (HOSTILE[0], HOSTILE[3]):  # math-verify ends the one itself, and the other with its process
            begun = time.monotonic()
            assert (await made.score(answer(rf"\boxed{{{boxed}}}", "x+42"))).value == 0.0
            assert time.monotonic() - begun < 15.0, "a worker that was killed is replaced"
        assert (await made.score(answer(r"\boxed{1+x}", "x+1"))).value == 1.0
        assert made.num_errors == 0


def test_an_accent_is_one_sign_with_its_letter_or_two() -> None:
    for text, label in (("café", "cafe\u0301"), ("cafe\u0301", "café"), ("Answer: cafe\u0301", '["thé", "café"]')):
        assert score("exact", text, label) == score("f1", text, label) == score("math", text, label) == 1.0
    assert score("exact", "cafe", "café") == 0.0
