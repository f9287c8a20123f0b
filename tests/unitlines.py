"""Unit files with their commands, for the unit tests and for real systemd: both must agree about each."""

from __future__ import annotations

#: name: the file, the program, the arguments with the program's name first.
COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {}

#: name: a file that systemd refuses, or that alone does not tell.
BROKEN: dict[str, str] = {}


def _line(name: str, value: str, *argv: str, executable: str = "") -> None:
    COMMANDS[name] = (f"[Service]\nExecStart={value}\n", executable or argv[0], argv)


_line("plain", "/opt/probe a b", "/opt/probe", "a", "b")
_line("blanks", "  /opt/probe\ta   b  ", "/opt/probe", "a", "b")
_line("double quotes", '/opt/probe "a b" ""', "/opt/probe", "a b", "")
_line("single quotes", "/opt/probe 'a b' ''", "/opt/probe", "a b", "")
_line("quotes in a word", "/opt/probe a'b c'd\"e f\"", "/opt/probe", "ab cde f")
_line("other quotes inside", """/opt/probe "it's" 'say "x"'""", "/opt/probe", "it's", 'say "x"')
_line("program in quotes", '"/opt/probe" x', "/opt/probe", "x")
_line("c escapes", r"/opt/probe \a\b\f\n\r\t\v\s\\ \"\'", "/opt/probe", "\a\b\f\n\r\t\v \\", "\"'")
_line("escapes in single quotes", r"/opt/probe 'a\'b\tc'", "/opt/probe", "a'b\tc")
_line("numbers", r"/opt/probe \x41\101\u20ac\U0001f600", "/opt/probe", "AA\u20ac\U0001f600")
_line("bytes", r"/opt/probe \xe2\x82\xac", "/opt/probe", "\u20ac")
_line("unknown escape", r"/opt/probe \q\d x\ y", "/opt/probe", r"\q\d", r"x\ y")
_line("no nul", r"/opt/probe \x00 \000", "/opt/probe", r"\x00", r"\000")
_line("short numbers", r"/opt/probe \x4 \u20a \40", "/opt/probe", r"\x4", r"\u20a", r"\40")
_line("octal too big", r"/opt/probe \777", "/opt/probe", r"\777")
_line("percent", "/opt/probe 50%% %%n", "/opt/probe", "50%", "%n")
_line("names", "/opt/probe %n %N %p", "/opt/probe", "stratum.service", "stratum", "stratum")
_line("directories", "/opt/probe %t %S %C %L %E", "/opt/probe", "/run", "/var/lib", "/var/cache", "/var/log", "/etc")
_line("no specifier", "/opt/probe %- %( x%/y %", "/opt/probe", "%-", "%(", "x%/y", "%")
_line("dollars", "/opt/probe $$ $$x a$$b $${x}", "/opt/probe", "$", "$x", "a$b", "${x}")
_line("dollar in a word", "/opt/probe a$b a$ x$$$", "/opt/probe", "a$b", "a$", "x$$")
_line("no expansion", ":/opt/probe $x ${x} $$", "/opt/probe", "$x", "${x}", "$$")
_line("ignore failure", "-/opt/probe x", "/opt/probe", "x")
_line("own name", "@/opt/probe mysh -c true", "mysh", "-c", "true", executable="/opt/probe")
_line("prefixes together", "-@+/opt/probe name x", "name", "x", executable="/opt/probe")
_line("privileges", "!/opt/probe x", "/opt/probe", "x")
_line("privileges or less", "!!/opt/probe x", "/opt/probe", "x")
_line("all of them", "-:+/opt/probe $x", "/opt/probe", "$x")
_line("prefix in quotes", '"-/opt/probe" x', "/opt/probe", "x")
_line("semicolon as a word", r"/opt/probe a \; b", "/opt/probe", "a", ";", "b")
_line("semicolon in quotes", '/opt/probe ";" a;b ;c', "/opt/probe", ";", "a;b", ";c")
_line("hash is no comment", "/opt/probe a #b", "/opt/probe", "a", "#b")
_line("equals", "/opt/probe --a=b =", "/opt/probe", "--a=b", "=")
_line("slashes", "/opt//./probe x", "/opt//./probe", "x", executable="/opt/probe")
_line("continued", "/opt/probe a \\\n  b\\\nc", "/opt/probe", "a", "b", "c")
_line("continued into a comment", "/opt/probe a \\\n# no\n ; nor\n b", "/opt/probe", "a", "b")
_line("continued in quotes", '/opt/probe "a\\\nb"', "/opt/probe", "a b")
_line("continued into nothing", "/opt/probe a \\\n\nExecReload=/bin/x", "/opt/probe", "a")
_line("no continuation", "/opt/probe a\\\\", "/opt/probe", "a\\")
_line("blank after the backslash", "/opt/probe a\\ \nNice=5", "/opt/probe", "a\\")
_line("other alphabets", "/opt/probe \u00e4\u20ac\u00a0x", "/opt/probe", "\u00e4\u20ac\u00a0x")


def _file(name: str, text: str, *argv: str) -> None:
    COMMANDS[name] = (text, argv[0], argv)


_file("reset", "[Service]\nExecStart=/bin/a\nExecStart=\nExecStart=/opt/probe b\n", "/opt/probe", "b")
_file("two sections", "[Service]\nNice=1\n[Unit]\nDescription=x\n[Service]\nExecStart=/opt/probe\n", "/opt/probe")
_file("spaces around", "  [Service]  \n\t ExecStart \t=  /opt/probe x\n", "/opt/probe", "x")
_file("comments", "#c\n;c\n[Service]\n # ExecStart=/bin/a\nExecStart=/opt/probe\n", "/opt/probe")
_file(
    "foreign sections",
    "[X-Ours]\nExecStart=/bin/a\n[Odd]\nExecStart=/bin/b\n[Service]\nExecStart=/opt/probe\n",
    "/opt/probe",
)
_file("wrong section", "[Unit]\nExecStart=/bin/a\n[Service]\nExecStart=/opt/probe\n", "/opt/probe")
_file("in front of all", "ExecStart=/bin/a\n[Service]\nExecStart=/opt/probe\n", "/opt/probe")
_file("no equals", "[Service]\nExecStart\nExecStart=/opt/probe\n", "/opt/probe")
_file("wrong case", "[Service]\nexecstart=/bin/a\nExecStart=/opt/probe\n", "/opt/probe")
_file("no end of line", "[Service]\nExecStart=/opt/probe x", "/opt/probe", "x")
_file("continued to the end", "[Service]\nExecStart=/opt/probe x \\", "/opt/probe", "x")
_file("carriage returns", "[Service]\r\nExecStart=/opt/probe x\r\n", "/opt/probe", "x")
_file("byte order mark", "\ufeff[Service]\nExecStart=/opt/probe x\n", "/opt/probe", "x")

BROKEN.update(
    {
        "two commands": "[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n",
        "two on one line": "[Service]\nExecStart=/bin/a x ; /bin/b\n",
        "none": "[Service]\nNice=1\n",
        "reset at the end": "[Service]\nExecStart=/bin/a\nExecStart=\n",
        "open quote": '[Service]\nExecStart=/bin/a "b\n',
        "open section": "[Service\nExecStart=/bin/a\n",
        "relative": "[Service]\nExecStart=bin/a\n",
        "only a prefix": "[Service]\nExecStart=@\n",
        "no name": "[Service]\nExecStart=@/bin/a\n",
        "unknown specifier": "[Service]\nExecStart=/opt/probe %z\n",
        "a digit behind a percent sign": "[Service]\nExecStart=/opt/probe 100%1\n",
        "not utf-8": "[Service]\nExecStart=/opt/probe \udcff\nExecStart=/opt/probe x\n",
        "not utf-8 elsewhere": "[Unit]\nDescription=\udcff\n[Service]\nExecStart=/opt/probe x\n",
        "a directory": "[Service]\nExecStart=/bin/\n",
    }
)
#: These systemd takes; the file alone does not tell.
UNTOLD = {
    "variable": "[Service]\nExecStart=/opt/probe $HOME\n",
    "variable in a word": "[Service]\nExecStart=/opt/probe a${HOME}b\n",
    "lone dollar": "[Service]\nExecStart=/opt/probe $\n",
}
BROKEN.update(UNTOLD)
