"""Removes secrets from everything that is stored, because users share run folders with colleagues and in issues.

A secret is recognized by its name (``--hf_token``, ``WANDB_API_KEY=``), its place (a password in a URL), its issuer's
format (``ghp_…``), or its randomness. Names stay; values become ``***``.
"""

from __future__ import annotations

import re
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

HIDDEN = "***"

# Words in a name whose value is always a secret.
_STRONG = frozenset({
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "apikey", "credential", "credentials",
    "passcode", "authorization", "jwt",
})  # fmt: skip
_ENDINGS = ("password", "passwd", "passphrase", "apikey")  # ends of such words, as in PGPASSWORD
# Words in a name whose value is a secret unless it is a number, a switch, or a text token.
_WEAK = frozenset(["token", "auth", "bearer", "cookie", "signature", "sig", "sas", "pat", "webhook", "otp"])
_KEYS = frozenset(("key", "keys"))
# Words that make a following "key" or "pass" a secret. Other keys, such as sort keys and image keys, are harmless.
_OWNERS = frozenset({
    "access", "account", "admin", "anthropic", "api", "app", "auth", "aws", "azure", "b2", "client", "cohere",
    "comet", "consumer", "datadog", "db", "dd", "deploy", "encryption", "fernet", "gcp", "gemini", "git",
    "github", "gitlab", "google", "hf", "hmac", "huggingface", "kaggle", "lambda", "license", "master", "minio",
    "mistral", "mlflow", "mysql", "neptune", "newrelic", "ngc", "nvapi", "openai", "openrouter", "pinecone",
    "postgres", "private", "redis", "registry", "replicate", "runpod", "s3", "secret", "sentry", "service",
    "session", "shared", "signing", "slack", "ssh", "stripe", "together", "twilio", "vast", "wandb", "wb",
})  # fmt: skip
# Words that show that a name means tokenizer tokens or a number, not a credential.
_OF_TEXTS = frozenset({
    "pad", "eos", "bos", "unk", "cls", "sep", "mask", "id", "ids", "max", "min", "num", "per", "type", "types",
    "len", "length", "size", "count", "budget", "image", "special", "begin", "end", "start", "stop", "prefix",
    "suffix", "level", "limit", "limits", "dim", "drop", "dropout", "rate", "mode", "class", "embedding",
    "embeddings", "info",
})  # fmt: skip
# Values that are harmless under a weak name: numbers, switches, and tokens such as ``<pad>`` and ``[CLS]``.
_HARMLESS = re.compile(
    r"|str|bytes|SecretStr|true|false|yes|no|on|off|none|null|auto|default|[-+]?\d{1,9}(\.\d*)?([eE][-+]?\d+)?|[<\[{(|]\S*|\S*[>\])}|]|\*{3,}",
    re.IGNORECASE,
)
_PATH = re.compile(r"(\.{0,2}|~\w*)/\S*|[\w.-]+(/[\w.-]+)+|\S+\.(pem|key|json|ya?ml|txt|toml|py|pt|bin|crt|pub)")
# Values after ``-p`` of an unknown program that are no passwords: words, numbers, ranges and precisions.
_NOT_PASSWORDS = re.compile(
    r"[a-zA-Z_]*|[\d.,:/x+\-]*[a-zA-Z]{0,3}|(bf|fp|int|tf|float|half|o)\d+\w*|\d+(-\d+)?(-mixed|-true)"
)
# Programs that take a password with ``-p``.
_WITH_P = re.compile(r"(mysql\w*|mariadb[\w-]*|mongo\w*|sshpass|docker|podman|7z[ar]?|ldap\w+)(\.exe)?")
_BROKEN_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_JOINED = re.compile(r"(.{2,})(token|secret|password|passwd|key)")

_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s/@:'\"]{0,256}):[^\s/'\"]{1,512}@")
# A user without a password. A token may stand there: ``https://TOKEN@github.com/x``.
_URL_TOKEN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,30}://)([^\s/@:'\"]{16,512})(?=@)")
# A name, and what stands before its value: also the dots of Megatron, the rule of a table, a pair of Python.
_NAME = re.compile(
    r"(?<![\w.-])([A-Za-z_][\w.-]{0,63})((?:(?:\\{0,7}[\"']|\\{1,7}u0022|&quot;|&#34;)?"
    r"(?:[ \t]{3,40}|\s{0,2})(?:=>|:=|={1,2}|%3[Dd]|:(?!//|:))(?:[ \t]{3,16}|\s{0,2})"
    r"| \.{3,80} |[ \t]{1,40}[|\u2502\u2503][ \t]{1,16}|\\{0,7}[\"'],\s{0,2}(?=\\{0,7}[bu]?[\"']))"
    r"(?:[bBfFrRuU]{1,2}(?=[\"']))?)"
)
# A value: in quotes, which JSON within a text escapes; bare; or cut off with the text.
_VALUE = re.compile(
    r"(\\{1,7}[\"'])[^\"'\\\n]{0,2048}\1|\"[^\"\n]{0,2048}\"|'[^'\n]{0,2048}'"
    r"|(\\{1,7}u0022|&quot;|&#34;)[^\"'\\&\n]{0,2048}\2|(?i:Bearer|Basic|Token)\s{1,8}[^\s,;&\"'\\]{1,2048}|[<\[|][^\s,;&\"'(){}]{0,63}|[^\s,;&\"'(){}]{1,2048}|\\{0,7}[\"'][^\"'\\\n]{1,2048}\Z"
)
_QUOTED = re.compile(r"(\\*[\"'])(.*)\1", re.DOTALL)
# An option with its value, as they stand in a command line or in a printed list of its words.
_OPTION = re.compile(
    r"(?<![\w-])(--?[A-Za-z][\w.-]{1,63})(=|[ \t]{1,8}|[\"'],\s{0,2}(?=[\"']))"
    r"(\"[^\"\n]{0,2048}\"|'[^'\n]{0,2048}'|[^\s\"',;&]{1,2048})"
)
_SPOKEN = re.compile(
    r"(?i)\b((?:wandb\s{1,8}login|(?:api|access|secret|auth|license)[ _-]?key|secret|password|passphrase|token)"
    r"(?:\s{1,8}(?:is|was|provided))?(?:\s{0,2}[:=])?\s{0,8}[\"']?)(?<=[\s\"':=])([A-Za-z0-9_\-+/=.]{16,})"
)
# Commands within a text, with a password that has no name, and Kaggle's file.
_PROGRAM = re.compile(
    r"\b((?:(?:sshpass|mysql\w{0,8}|mariadb|mongo\w{0,8})\b|(?:docker|podman)\s{1,4}login\b)[^\n|;&]{0,120}?\s-p\s?"
    r"|curl\b[^\n|;&]{0,120}?\s(?:-u|--user)[\s=]{1,4}[\"']?[^\s:\"']{1,64}:"
    r"|username\\{0,7}\":\s?\\{0,7}\"[^\"\n]{1,64}\",\s?\\{0,7}\"key\\{0,7}\":\s?\\{0,7}\")([^\s\"'-][^\s\"']{0,256})"
)
_BEARER = re.compile(r"\b(bearer|basic)(\s{1,8})([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
# Credentials that their issuers made recognizable. What follows a part without a limit is optional: time is linear.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|(?:AKIA|ASIA|AGPA|AROA|AIDA|ABIA|ACCA)[0-9A-Z]{16}"
    r"|(?<!-)sk-(?=[\w-]{0,200}\d)(?:[a-z0-9]{2,6}-){0,4}[A-Za-z0-9_]{16,}[\w-]*|[sr]k_(?:live|test)_\w{10,}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|gl(?:pat|dt|rt|cbt|ptt|agent|soat)-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{30,}|gsk_[A-Za-z0-9]{20,}"
    r"|dapi[0-9a-f]{32}(?:-\d)?|SG\.[\w-]{16,}\.[\w-]{16,}|do[opr]_v1_[0-9a-f]{40,}|shp(?:at|ss|ca|pa)_[0-9a-f]{32}"
    r"|wandb_v\d_\w{20,}|ATATT[\w=-]{20,}|dckr_(?:pat|oat)_[\w-]{20,}|tskey-[\w-]{16,}|hv[bsr]\.[\w-]{20,}"
    r"|gl(?:sa|c)_\w{20,}|NRAK-[A-Z0-9]{20,}|pcsk_\w{20,}|xai-\w{20,}|pplx-\w{20,}|rpa_\w{20,}|lin_api_\w{20,}"
    r"|ms-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|AGE-SECRET-KEY-1[0-9A-Z]{30,}|\d{8,10}:AA[\w-]{30,}|(?:local|wandb)-[0-9a-f]{40})"
    r"|(?<![\w-])eyJ(?:[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|[\w-]{40,}={0,2})"
)
# Addresses that let whoever knows them post: all that follows is the secret.
_HOOKS = re.compile(
    r"(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api(?:/v\d+)?/webhooks"
    r"|webhook\.office(?:365)?\.com/webhookb2|outlook\.office(?:365)?\.com/webhook"
    r"|(?:logic\.azure|powerplatform|powerautomate)\.(?:com|us|cn)(?::\d{1,5})?(?:/[\w-]{1,40}){0,3}/workflows"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/(?:v\d/)?hook|hooks\.zapier\.com/hooks|hc-ping\.com"
    r"|api\.telegram\.org|maker\.ifttt\.com/trigger|qyapi\.weixin\.qq\.com/cgi-bin/webhook|events\.pagerduty\.com"
    r"|chat\.googleapis\.com/v1/spaces|://[\w.-]{1,255}(?::\d{1,5})?/hooks)/[^\s\"'<>\\,;)\]}]+"
)
_PEM = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----).*?(-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL
)
_RUN = re.compile(r"(?<![A-Za-z0-9_/])[A-Za-z0-9]{20,}(?![A-Za-z0-9])")
_WANDB = re.compile(r"wandb|w&b|weights\s?(?:and|&)\s?biases", re.IGNORECASE)
_WANDB_KEY = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
# Stands before a commit or checksum, which has the form of a key of W&B.
_HASHED = re.compile(
    r"commit|sha|hash|rev|git|digest|checksum|branch|head|artifact|version|tree|blob|model|tag|md5|@\s*$", re.IGNORECASE
)
_NEAR = 32  # our choice: so many characters before such a number tell what it is
# Matches every text that can hold a secret. Most texts do not match, and need no more work.
_SOME = re.compile(
    r"(?i)[:=@\"'|\u2502\u2503]|%3[Dd]|\.{3}|(?:^|\s)--?[a-z]|-----BEGIN|://|[A-Za-z0-9_/+-]{16}|bearer|basic"
)


def hide_secrets(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line without the values of options that look like secrets."""
    shown: list[str] = []
    option = ""
    program = ""
    for word in command:
        if option and not word.startswith("--"):
            user, colon, _ = word.partition(":")
            if option in {"-p", "-P"}:
                hides = program or not (_NOT_PASSWORDS.fullmatch(word) or _PATH.fullmatch(word))
                shown.append(HIDDEN if hides else word)
            elif option == "-u" and colon and "/" not in word:  # curl and similar programs: user:password
                shown.append(f"{user}:{HIDDEN}")
            else:
                shown.append(hide_value(option, word))
            option = ""
            continue
        takes_secret = word in {"-p", "-P"} or (word == "-u" and program == "") or _strength(word) > 0
        option = word if word.startswith("-") and "=" not in word and takes_secret else ""
        name, sep, value = word.partition("=")
        if program and re.fullmatch(r"-p[^-=].*", word) and not program.startswith(("docker", "podman")):
            shown.append(f"-p{HIDDEN}")
        elif sep and "://" not in name and re.fullmatch(r"[-+]*[\w.@/][\w.@/-]*", name) and _is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_in_text(word))
        command_name = word.rpartition("/")[2]
        if _WITH_P.fullmatch(command_name):
            program = command_name
    return tuple(shown)


def hide_in_text(text: str) -> str:
    """Return a text without passwords in URLs, values of secret names, and strings that look like credentials."""
    if not _SOME.search(text):
        return text
    text = _PEM.sub(rf"\1{HIDDEN}\2", text)
    text = _URL_USER.sub(rf"\1:{HIDDEN}@", text)
    text = _URL_TOKEN.sub(_HIDE_URL_TOKEN, text)
    text = _HOOKS.sub(rf"\1/{HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    if _WANDB.search(text):
        lines = text.split("\n")
        text = "\n".join(_hide_wandb_keys(line, before) for before, line in zip(["", *lines], lines))
    text = _PROGRAM.sub(rf"\1{HIDDEN}", text)
    text = _OPTION.sub(_option_shown, text)
    text = _hide_pairs(text)
    text = _SPOKEN.sub(_HIDE_MIXED, text)
    text = _BEARER.sub(_HIDE_BEARER, text)
    return _RUN.sub(_HIDE_RANDOM, text)


def hide_value(name: str, value: str) -> str:
    """Return the value of a name, such as a variable or a key of JSON, without secrets."""
    return HIDDEN if _is_secret(name, value) else hide_in_text(value)


def _hide_wandb_keys(line: str, before: str) -> str:
    """Hide 40 hex digits in a line about W&B, unless the words before them say that they are a commit or hash."""
    # A line is also about W&B if it is a key alone, below one that names W&B: what was pasted at its prompt.
    is_answer = _WANDB.search(before) and _WANDB_KEY.fullmatch(line.strip())
    if not _WANDB.search(line) and not is_answer:
        return line
    text, at = f"{before}\n{line}", len(before) + 1

    def shown(found: re.Match[str]) -> str:
        start = at + found.start()
        return found[0] if _HASHED.search(text[max(0, start - _NEAR) : start]) else HIDDEN

    return _WANDB_KEY.sub(shown, line)


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
        quoted = _QUOTED.fullmatch(value[0])
        mark, bare = quoted.groups() if quoted else ("", value[0])
        # "token: x" is usually prose; "token=x" is a setting.
        is_prose = ":" in sep and not mark and not _is_mixed(bare)
        if "," in sep:  # ('password', 'x') is a pair, and ['password', 'user'] are names
            is_prose = not _is_mixed(bare)
            if "(" not in text[max(0, found.start() - 3) : found.start()]:
                continue
        is_code = "==" in sep or text.startswith("(", value.end())  # signature = inspect.signature(f)
        if _is_secret(name, bare) and (_strength(name) == 2 or not (is_prose or is_code)):
            shown += [text[at : found.end()], mark, HIDDEN, mark]
            at = value.end()
    return "".join([*shown, text[at:]])


def _is_secret(name: str, value: str) -> bool:
    strength = _strength(name)
    if strength == 2:
        return (value not in {"", HIDDEN} and not _HARMLESS.fullmatch(value[:64])) or bool(value.isdigit())
    return strength == 1 and not _HARMLESS.fullmatch(value) and not _PATH.fullmatch(value)


@lru_cache(maxsize=1024)
def _strength(option: str) -> int:
    """Return how surely an option's words name a secret: 2 for ``--hf-password``, 0 for ``--tokenizer``."""
    # "--wandbApiKey" has three words, and "--hftoken" two
    words: list[str] = []
    for word in re.split(r"[^a-z0-9]+", _BROKEN_CAMEL.sub("_", option[-128:]).lower()):
        joined = _JOINED.fullmatch(word)
        is_pair = joined is not None and joined[1] in _OWNERS | {"refresh", "id", "bearer", "user"}
        words += joined.groups() if joined is not None and is_pair else [word] if word else []
    if words == ["pwd"]:
        return 1  # a password of ODBC, or the working directory
    if any(word in _STRONG or word.endswith(_ENDINGS) for word in words):
        return 2
    for before, word in zip(["", *words], words):
        if word in _KEYS and before in _OWNERS:
            return 2
        if word == "pass" and (before in _OWNERS or before in {"", "user", "smtp", "root", "login", "mail"}):
            return 1
    return 1 if _WEAK.intersection(words) and not _OF_TEXTS.intersection(words) else 0


def _is_mixed(value: str) -> bool:
    """Return whether a value has letters and digits, as most credentials do and few words."""
    return len(value) >= 8 and any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def _is_random(run: str) -> bool:
    """Return whether letters and digits alternate as if drawn at random, which names never do."""
    # Commits, checksums and UUIDs have hex digits only, and are not random here. CamelCaseNames42 change once a word.
    if re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", run) or run.startswith(("ZN", "ZNK")):
        return False
    kinds = ["d" if char.isdigit() else "u" if char.isupper() else "l" for char in run]
    pairs = zip(kinds, kinds[1:])  # noqa: RUF007 - ranks may run Python 3.8
    changes = sum(a != b for a, b in pairs) / (len(run) - 1)
    digits = kinds.count("d")
    if len(set(kinds)) == 3:
        return digits >= 2 and changes > 0.45
    return len(run) >= 24 and digits >= 5 and changes > 0.35


def _last(is_secret: Callable[[str], bool]) -> Callable[[re.Match[str]], str]:
    """Return what hides the last group of a match, with which it ends, where that is a secret."""

    def shown(found: re.Match[str]) -> str:
        last = found[found.re.groups]
        return found[0][: -len(last)] + HIDDEN if is_secret(last) else found[0]

    return shown


# The only name before a host is a token if it has digits, or is longer than a name of a user.
_HIDE_URL_TOKEN = _last(lambda name: _is_mixed(name) or (len(name) >= 20 and name.isalnum()))
_HIDE_BEARER = _last(lambda token: _is_mixed(token) or len(token) >= 24)
_HIDE_MIXED, _HIDE_RANDOM = _last(_is_mixed), _last(_is_random)
