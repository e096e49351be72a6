"""Removes secrets from everything that is stored, because users share run folders with colleagues and in issues.

A secret is recognized by its name (``--hf_token``, ``WANDB_API_KEY=``), its place (a password in a URL), its issuer's
format (``ghp_…``), or its randomness. Names stay; values become ``***``. This module needs only the standard library,
because ranks use it on the texts of exceptions.
"""

from __future__ import annotations

import re

HIDDEN = "***"

_STRONG = frozenset({
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "apikey", "credential", "credentials",
    "passcode", "authorization", "jwt",
})  # fmt: skip
"""Words in a name whose value is always a secret."""
_WEAK = frozenset(["token", "auth", "bearer", "cookie", "signature", "sig", "sas", "pat", "webhook", "otp"])
"""Words in a name whose value is a secret unless it is a number, a switch, or a text token."""
_KEYS = frozenset(("key", "keys"))
_OWNERS = frozenset({
    "access", "account", "admin", "anthropic", "api", "app", "auth", "aws", "azure", "b2", "client", "cohere",
    "comet", "consumer", "datadog", "db", "dd", "deploy", "encryption", "fernet", "gcp", "gemini", "git",
    "github", "gitlab", "google", "hf", "hmac", "huggingface", "kaggle", "lambda", "license", "master", "minio",
    "mistral", "mlflow", "mysql", "neptune", "newrelic", "ngc", "nvapi", "openai", "openrouter", "pinecone",
    "postgres", "private", "redis", "registry", "replicate", "runpod", "s3", "secret", "sentry", "service",
    "session", "shared", "signing", "slack", "ssh", "stripe", "together", "twilio", "vast", "wandb", "wb",
})  # fmt: skip
"""Words that make a following "key" or "pass" a secret. Other keys, such as sort keys and image keys, are harmless."""
_OF_TEXTS = frozenset({
    "pad", "eos", "bos", "unk", "cls", "sep", "mask", "id", "ids", "max", "min", "num", "per", "type", "types",
    "len", "length", "size", "count", "budget", "image", "special", "begin", "end", "start", "stop", "prefix",
    "suffix", "level", "limit", "limits", "dim", "drop", "dropout", "rate", "mode", "class", "embedding",
    "embeddings",
})  # fmt: skip
"""Words that show that a name means tokenizer tokens or a number, not a credential."""
_HARMLESS = re.compile(
    r"|true|false|yes|no|on|off|none|null|auto|default|[-+]?\d{1,9}(\.\d*)?([eE][-+]?\d+)?|[<\[{(|]\S*|\S*[>\])}|]|\*{3,}",
    re.IGNORECASE,
)
"""Values that are harmless under a weak name: numbers, switches, and tokens such as ``<pad>`` and ``[CLS]``."""
_PATH = re.compile(r"(\.{0,2}|~\w*)/\S*|[\w.-]+(/[\w.-]+)+|\S+\.(pem|key|json|ya?ml|txt|toml|py|pt|bin|crt|pub)")
_NOT_PASSWORDS = re.compile(
    r"[a-zA-Z_]*|[\d.,:/x+\-]*[a-zA-Z]{0,3}|(bf|fp|int|tf|float|half|o)\d+\w*|\d+(-\d+)?(-mixed|-true)"
)
"""Values after ``-p`` of an unknown program that are no passwords: words, numbers, ranges and precisions."""
_WITH_P = re.compile(r"(mysql\w*|mariadb[\w-]*|mongo\w*|sshpass|docker|podman|7z[ar]?|ldap\w+)(\.exe)?")
"""Programs that take a password with ``-p``."""
_BROKEN_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINED = re.compile(r"(.{2,})(token|secret|password|passwd|key)")

_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s/@:'\"]{0,256}):[^\s/'\"]{1,512}@")
_NAME = re.compile(r"(?<![\w.-])([A-Za-z_][\w.-]{0,63})([\"']?\s{0,2}(?:=>|:=|=|:(?!//|:))\s{0,2})")
_VALUE = re.compile(
    r"\"[^\"\n]{0,2048}\"|'[^'\n]{0,2048}'|(?:Bearer|Basic|Token)\s+[^\s,;&\"']{1,2048}|[^\s,;&\"'(){}]{1,2048}"
)
_OPTION = re.compile(
    r"(?<![\w-])(--?[A-Za-z][\w.-]{1,63})(=|[ \t]{1,8}|[\"'],\s{0,2}(?=[\"']))"
    r"(\"[^\"\n]{0,2048}\"|'[^'\n]{0,2048}'|[^\s\"',;&]{1,2048})"
)
"""An option with its value, as they stand in a command line or in a printed list of its words."""
_SPOKEN = re.compile(
    r"\b((?:wandb\s+login|(?:api|access|secret)[ _-]?key|secret|password|token)\s+(?:is\s+|was\s+)?)"
    r"([A-Za-z0-9_\-+/=.]{16,})"
)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|(?:AKIA|ASIA|AGPA|AROA)[0-9A-Z]{16}"
    r"|sk-(?=[\w-]*\d)(?:[a-z0-9]{2,6}-)*[A-Za-z0-9_]{16,}[\w-]*|[sr]k_(?:live|test)_\w{10,}|xox[a-z]-[\w-]{10,}"
    r"|xapp-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|AIza[\w-]{30,}|ya29\.[\w-]{20,}|glpat-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{20,}"
    r"|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}|do[opr]_v1_[0-9a-f]{40,}|shp(?:at|ss|ca)_[0-9a-f]{32}"
    r"|wandb_v\d_\w{20,}|ATATT[\w=-]{20,}|dckr_pat_[\w-]{20,}|tskey-[\w-]{16,}|(?:local|wandb)-[0-9a-f]{40})"
)
_HOOKS = re.compile(r"(hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks)/[\w/-]+")
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_RUN = re.compile(r"(?<![A-Za-z0-9_/])[A-Za-z0-9]{20,}(?![A-Za-z0-9])")
_SOME = re.compile(r"[:=@]|(?:^|\s)--?[a-z]|-----BEGIN|://|[A-Za-z0-9_/+-]{16}|bearer|basic", re.IGNORECASE)
"""Matches every text that can hold a secret. Most texts do not match, and need no more work."""


def hide_secrets(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line without the values of options that look like secrets."""
    shown: list[str] = []
    option = ""
    program = ""
    for word in command:
        if option and not word.startswith("--"):
            shown.append(_value_shown(option, word, program))
            option = ""
            continue
        option = word if _takes_secret(word, program) else ""
        shown.append(_word_shown(word, program))
        name = word.rpartition("/")[2]
        if _WITH_P.fullmatch(name):
            program = name
    return tuple(shown)


def hide_in_text(text: str) -> str:
    """Return a text without passwords in URLs, values of secret names, and strings that look like credentials."""
    if not _SOME.search(text):
        return text
    text = _PEM.sub(rf"\1{HIDDEN}\2", text)
    text = _URL_USER.sub(rf"\1:{HIDDEN}@", text)
    text = _HOOKS.sub(rf"\1/{HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _OPTION.sub(_option_shown, text)
    text = _hide_pairs(text)
    text = _SPOKEN.sub(lambda found: found[1] + (HIDDEN if _is_mixed(found[2]) else found[2]), text)
    text = _BEARER.sub(lambda found: found[1] + found[2] + (HIDDEN if _is_mixed(found[3]) else found[3]), text)
    return _RUN.sub(lambda found: HIDDEN if _is_random(found[0]) else found[0], text)


def _takes_secret(word: str, program: str) -> bool:
    """Return whether the word after an option may be a secret value."""
    if not word.startswith("-") or "=" in word:
        return False
    return word in {"-p", "-P"} or (word == "-u" and program == "") or _strength(word) > 0


def _value_shown(option: str, value: str, program: str) -> str:
    if option in {"-p", "-P"}:
        return HIDDEN if program or not (_NOT_PASSWORDS.fullmatch(value) or _PATH.fullmatch(value)) else value
    if option == "-u":  # curl and similar programs: user:password
        user, colon, _ = value.partition(":")
        return f"{user}:{HIDDEN}" if colon and "/" not in value else hide_in_text(value)
    return HIDDEN if _is_secret(option, value) else hide_in_text(value)


def _word_shown(word: str, program: str) -> str:
    if program and re.fullmatch(r"-p[^-=].*", word) and not program.startswith(("docker", "podman")):
        return f"-p{HIDDEN}"
    name, sep, value = word.partition("=")
    if sep and "://" not in name and re.fullmatch(r"[-+]*[\w.@/-]+", name) and _is_secret(name, value):
        return f"{name}={HIDDEN}"
    return hide_in_text(word)


def _option_shown(found: re.Match[str]) -> str:
    name, sep, value = found.groups()
    mark = value[0] if value[0] in "\"'" else ""
    bare = value.strip("\"'")
    hides = not bare.startswith("-") and _is_secret(name, bare)
    return f"{name}{sep}{mark}{HIDDEN}{mark}" if hides else found[0]


def _hide_pairs(text: str) -> str:
    """Hide the values of names that are secrets, as in ``token=x``, ``"api_key": "x"`` and ``password: x``."""
    shown, at = [], 0
    for found in _NAME.finditer(text):
        name, sep = found.groups()
        value = _VALUE.match(text, found.end()) if found.start() >= at and _strength(name) else None
        if value is None:
            continue
        mark = value[0][0] if value[0][0] in "\"'" else ""
        bare = value[0].strip("\"'")
        # "token: x" is usually prose; "token=x" is a setting.
        is_prose = ":" in sep and _strength(name) < 2 and not mark and not _is_mixed(bare)
        if _is_secret(name, bare) and not is_prose:
            shown += [text[at : found.end()], mark, HIDDEN, mark]
            at = value.end()
    return "".join([*shown, text[at:]])


def _is_secret(name: str, value: str) -> bool:
    strength = _strength(name)
    if strength == 2:
        return (value not in {"", HIDDEN} and not _HARMLESS.fullmatch(value[:64])) or bool(value.isdigit())
    return strength == 1 and not _HARMLESS.fullmatch(value) and not _PATH.fullmatch(value)


def _strength(option: str) -> int:
    """Return how surely an option's words name a secret: 2 for ``--hf-password``, 0 for ``--tokenizer``."""
    words = _words(option)
    if _STRONG.intersection(words):
        return 2
    for before, word in zip(["", *words], words):
        if word in _KEYS and before in _OWNERS:
            return 2
        if word == "pass" and (before in _OWNERS or before in {"", "user", "smtp", "root", "login", "mail"}):
            return 1
    if _WEAK.intersection(words) and not _OF_TEXTS.intersection(words):
        return 1
    return 0


def _words(option: str) -> list[str]:
    """Return the words of a name: "--wandbApiKey" has three, and "--hftoken" two."""
    plain = _BROKEN_CAMEL.sub("_", option[-128:]).lower()
    found: list[str] = []
    for word in re.split(r"[^a-z0-9]+", plain):
        joined = _JOINED.fullmatch(word)
        if joined and joined[1] in _OWNERS | {"refresh", "id", "bearer", "user"}:
            found += joined.groups()
        elif word:
            found.append(word)
    return found


def _is_mixed(value: str) -> bool:
    """Return whether a value has letters and digits, as most credentials do and few words."""
    return len(value) >= 8 and any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def _is_random(run: str) -> bool:
    """Return whether letters and digits alternate as if drawn at random, which names never do.

    Commits, checksums and UUIDs use only hex digits, and are not random here. CamelCaseNames42 change case once a word.
    """
    if re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", run) or run.startswith(("ZN", "ZNK")):
        return False
    kinds = ["d" if char.isdigit() else "u" if char.isupper() else "l" for char in run]
    pairs = zip(kinds, kinds[1:])  # noqa: RUF007 - ranks may run Python 3.8
    changes = sum(a != b for a, b in pairs) / (len(run) - 1)
    digits = kinds.count("d")
    if len(set(kinds)) == 3:
        return digits >= 2 and changes > 0.45
    return len(run) >= 24 and digits >= 5 and changes > 0.35
