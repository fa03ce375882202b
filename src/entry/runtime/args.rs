//! The command line of an OCI runtime, read as runc, crun and youki read it.
//!
//! They differ: Go's flag package takes `-bundle DIR` and `--b DIR`, getopt takes `-bDIR` and `--bun=DIR`, clap takes
//! options after the container's name. What any of them would take as a bundle is one here, and what none of them
//! knows must not hide a `create`: the container would start without its limits.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::entry::report::{Format, Log};

/// What an engine wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// Where it looks for errors.
    pub log: Log,
    /// What is to be done.
    pub call: Call,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `create`
    Create(Bundle),
    /// `run`
    Run(Bundle),
    /// Nothing that reads a bundle.
    Other,
}

/// Where a container is described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// The directory, `.` where it is not named.
    pub directory: PathBuf,
    /// The document, `config.json` in that directory where no other is named.
    pub spec: PathBuf,
}

/// What an option means to us.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Bundle,
    Config,
    Log,
    LogFormat,
    /// Asks for an explanation or the version, and for nothing else.
    Explain,
    /// Has a value that is nothing to us.
    Value,
    /// Has no value.
    Switch,
}

struct Opt {
    name: &'static str,
    short: &'static [u8],
    meaning: Meaning,
}

const fn opt(name: &'static str, short: &'static [u8], meaning: Meaning) -> Opt {
    Opt { name, short, meaning }
}

/// runc 0.1 to 1.4 (`main.go`, `create.go`, `run.go`), crun 0.1 to 1.24 (`src/crun.c`, `create.c`, `run.c`) and youki
/// (`liboci-cli`, `main.rs`). One table for both levels: since runc went to urfave/cli v3 it takes its global options
/// after the command, too.
const OPTIONS: &[Opt] = &[
    opt("bundle", b"b", Meaning::Bundle),
    opt("cgroup-manager", b"", Meaning::Value),
    opt("config", b"f", Meaning::Config),
    opt("console", b"", Meaning::Value),
    opt("console-socket", b"c", Meaning::Value),
    opt("criu", b"", Meaning::Value),
    opt("debug", b"", Meaning::Switch),
    opt("detach", b"d", Meaning::Switch),
    opt("help", b"h?", Meaning::Explain),
    opt("keep", b"", Meaning::Switch),
    opt("log", b"l", Meaning::Log),
    opt("log-format", b"", Meaning::LogFormat),
    opt("log-level", b"", Meaning::Value),
    opt("no-new-keyring", b"", Meaning::Switch),
    opt("no-pivot", b"", Meaning::Switch),
    opt("no-subreaper", b"", Meaning::Switch),
    opt("pid-file", b"p", Meaning::Value),
    opt("pidfd-socket", b"", Meaning::Value),
    opt("preserve-fds", b"", Meaning::Value),
    opt("root", b"r", Meaning::Value),
    opt("rootless", b"", Meaning::Value),
    opt("systemd-cgroup", b"s", Meaning::Switch),
    opt("systemd-log", b"", Meaning::Switch),
    opt("usage", b"", Meaning::Explain),
    opt("version", b"vV", Meaning::Explain),
];

/// The commands of the three, to tell a command from the value of an option that is not in the table.
const COMMANDS: &[&[u8]] = &[
    b"checkpoint",
    b"completion",
    b"create",
    b"delete",
    b"events",
    b"exec",
    b"features",
    b"help",
    b"info",
    b"init",
    b"kill",
    b"list",
    b"mounts",
    b"pause",
    b"ps",
    b"restore",
    b"resume",
    b"run",
    b"spec",
    b"start",
    b"state",
    b"update",
];

/// Reads the arguments that follow the program's name.
pub fn parse(arguments: &[OsString]) -> CommandLine {
    let mut words = Words { rest: arguments };
    let mut found = Found::default();
    let command = command(&mut words, &mut found);
    let call = match command.map(OsStr::as_bytes) {
        Some(b"create") if options(&mut words, &mut found) => Call::Create(found.bundle()),
        Some(b"run") if options(&mut words, &mut found) => Call::Run(found.bundle()),
        _ => Call::Other,
    };
    CommandLine { log: found.log(), call }
}

/// The command, past the options before it; none where they ask for an explanation.
fn command<'a>(words: &mut Words<'a>, found: &mut Found<'a>) -> Option<&'a OsStr> {
    loop {
        match words.next()? {
            Word::Plain(command) => return Some(command),
            // what follows the terminator of the options is the command all the same
            Word::End => return words.plain(),
            Word::Explain => return None,
            Word::Option(meaning, value) => found.note(meaning, value),
            Word::Unknown { has_value } => {
                if !has_value && words.next_is_a_value() {
                    words.plain();
                }
            }
        }
    }
}

/// Reads the options of `create` or `run`; false where an explanation is asked for, so that nothing is created.
fn options<'a>(words: &mut Words<'a>, found: &mut Found<'a>) -> bool {
    let mut named = false;
    while let Some(word) = words.next() {
        match word {
            Word::End => return true,
            Word::Explain if !named => return false,
            Word::Plain(_) => named = true,
            Word::Option(meaning, value) => found.note(meaning, value),
            Word::Explain | Word::Unknown { .. } => {}
        }
    }
    true
}

/// The arguments that were not read yet.
struct Words<'a> {
    rest: &'a [OsString],
}

/// One argument, or two where an option has its value in the next one.
enum Word<'a> {
    /// Not an option.
    Plain(&'a OsStr),
    /// `--`
    End,
    /// An option of the table, with its value where it has one.
    Option(Meaning, Option<&'a OsStr>),
    /// `--help`, `--version`
    Explain,
    /// An option that is not in the table.
    Unknown {
        /// Whether it brought a value along, `--option=value`.
        has_value: bool,
    },
}

impl<'a> Words<'a> {
    fn plain(&mut self) -> Option<&'a OsStr> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn next(&mut self) -> Option<Word<'a>> {
        let word = self.plain()?;
        Some(match word.as_bytes() {
            b"--" => Word::End,
            [b'-', b'-', long @ ..] => self.long(long, true),
            [b'-', short @ ..] if !short.is_empty() => self.short(short),
            _ => Word::Plain(word),
        })
    }

    /// `--name`, `--name=value`; with `abbreviated`, also the beginning of a name that begins no other (getopt).
    fn long(&mut self, text: &'a [u8], abbreviated: bool) -> Word<'a> {
        let (name, value) = match text.iter().position(|byte| *byte == b'=') {
            Some(at) => (&text[..at], Some(OsStr::from_bytes(&text[at + 1..]))),
            None => (text, None),
        };
        let known = named(name).or_else(|| abbreviated.then(|| begun(name)).flatten());
        known.map_or(Word::Unknown { has_value: value.is_some() }, |meaning| self.option(meaning, value))
    }

    /// `-b DIR` and `-bundle DIR` (Go), `-bDIR` and `-dbDIR` (getopt, clap).
    fn short(&mut self, text: &'a [u8]) -> Word<'a> {
        let whole = self.long(text, false);
        if !matches!(whole, Word::Unknown { .. }) {
            return whole;
        }
        for (at, letter) in text.iter().enumerate() {
            match named(std::slice::from_ref(letter)) {
                Some(Meaning::Switch) => {}
                Some(Meaning::Explain) => return Word::Explain,
                Some(meaning) => {
                    let glued = text[at + 1..].strip_prefix(b"=").unwrap_or(&text[at + 1..]);
                    let glued = Some(OsStr::from_bytes(glued)).filter(|value| !value.is_empty());
                    return self.option(meaning, glued);
                }
                None => return whole,
            }
        }
        Word::Option(Meaning::Switch, None)
    }

    fn option(&mut self, meaning: Meaning, value: Option<&'a OsStr>) -> Word<'a> {
        match meaning {
            // `--help=false` asks for nothing
            Meaning::Explain if value.is_none() => Word::Explain,
            Meaning::Explain | Meaning::Switch => Word::Option(Meaning::Switch, None),
            _ => Word::Option(meaning, value.or_else(|| self.plain())),
        }
    }

    /// Whether the next word is the value of an unknown option: it is not, where it could be more than that.
    fn next_is_a_value(&self) -> bool {
        let Some(next) = self.rest.first().map(|word| word.as_bytes()) else { return false };
        !next.starts_with(b"-") && !COMMANDS.contains(&next)
    }
}

/// The option of that name, long or short.
fn named(name: &[u8]) -> Option<Meaning> {
    let is_named = |option: &&Opt| {
        option.name.as_bytes() == name || matches!(name, [letter] if option.short.contains(letter))
    };
    OPTIONS.iter().find(is_named).map(|option| option.meaning)
}

/// The one option whose name begins so.
fn begun(name: &[u8]) -> Option<Meaning> {
    let mut options = OPTIONS.iter().filter(|option| option.name.as_bytes().starts_with(name));
    match (options.next(), options.next()) {
        (Some(option), None) => Some(option.meaning),
        _ => None,
    }
}

/// What the options said; the last of several counts.
#[derive(Default)]
struct Found<'a> {
    bundle: Option<&'a OsStr>,
    config: Option<&'a OsStr>,
    log: Option<&'a OsStr>,
    log_format: Option<&'a OsStr>,
}

impl<'a> Found<'a> {
    fn note(&mut self, meaning: Meaning, value: Option<&'a OsStr>) {
        match meaning {
            Meaning::Bundle => self.bundle = value,
            Meaning::Config => self.config = value,
            Meaning::Log => self.log = value,
            Meaning::LogFormat => self.log_format = value,
            Meaning::Explain | Meaning::Value | Meaning::Switch => {}
        }
    }

    fn bundle(&self) -> Bundle {
        const SPEC: &str = "config.json";
        let given = |value: Option<&'a OsStr>| value.filter(|text| !text.is_empty()).map(Path::new);
        let directory = given(self.bundle).unwrap_or(Path::new(".")).to_owned();
        let spec = match given(self.config) {
            // a path of the caller's directory, not of the bundle, but for the default's own name (crun's
            // run_create.c, runc's revisePaths)
            Some(path) if path != Path::new(SPEC) => path.to_owned(),
            _ => directory.join(SPEC),
        };
        Bundle { directory, spec }
    }

    fn log(&self) -> Log {
        // crun: `[file:]PATH`, `journald:ID`, `syslog:ID`
        let path = self.log.map(OsStr::as_bytes).and_then(|log| match log {
            [] => None,
            log if log.starts_with(b"journald:") || log.starts_with(b"syslog:") => None,
            log => Some(log.strip_prefix(b"file:").unwrap_or(log)),
        });
        Log {
            path: path.map(|path| PathBuf::from(OsStr::from_bytes(path))),
            format: if self.log_format == Some(OsStr::new("json")) { Format::Json } else { Format::Text },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;
    use std::os::unix::ffi::OsStringExt;

    fn words(line: &str) -> Vec<OsString> {
        line.split_ascii_whitespace().map(OsString::from).collect()
    }

    fn spec(line: &str) -> Option<String> {
        match parse(&words(line)).call {
            Call::Create(bundle) | Call::Run(bundle) => Some(bundle.spec.to_str().unwrap().to_owned()),
            Call::Other => None,
        }
    }

    // as the engines call, facts/engines.md
    #[rstest]
    #[case::containerd(
        "--root /run/containerd/runc/default --log /b/log.json --log-format json --systemd-cgroup create --bundle /b \
         --pid-file /b/init.pid c1"
    )]
    #[case::conmon("create --bundle /b --pid-file /p c1")]
    #[case::conmon_with_log(
        "--log-format=json --log /l --systemd-cgroup create --bundle /b --pid-file /p c1"
    )]
    #[case::crio("--root=/run/runc create --bundle /b --pid-file /b/pidfile c1")]
    #[case::buildah("create --bundle /b --pid-file /b/pid --no-new-keyring c1")]
    #[case::docker(
        "--root /var/run/docker/runtime-runc/moby --log /b/log.json --log-format json run --bundle /b -d c1"
    )]
    // what Go's flag package takes
    #[case::one_dash("-root /r -debug create -bundle /b -pid-file /p c1")]
    #[case::two_dashes_for_a_letter("create --b /b c1")]
    #[case::an_equals_sign("--root=/r --debug=false create --bundle=/b c1")]
    #[case::a_letter_with_an_equals_sign("create -b=/b c1")]
    #[case::a_value_that_looks_like_an_option("create --pid-file --bundle --bundle /b c1")]
    #[case::a_value_that_looks_like_a_command("--root create create --bundle /b c1")]
    #[case::the_last_one_counts("create --bundle /a --bundle /b c1")]
    #[case::terminated("-- create --bundle /b -- c1")]
    #[case::rootless("--rootless auto --criu /c create --bundle /b c1")]
    #[case::explained_not("create --help=false --bundle /b c1")]
    // what getopt takes
    #[case::glued("create -b/b c1")]
    #[case::glued_after_a_switch("run -db/b c1")]
    #[case::apart_after_a_switch("run -db /b c1")]
    #[case::abbreviated("--roo /r create --bun /b c1")]
    #[case::crun("--cgroup-manager systemd --log-level debug create --bundle /b c1")]
    // what clap takes
    #[case::after_the_name("create c1 --bundle /b")]
    #[case::letters("-l /l -r /r -s create -p /p -c /c -b /b c1")]
    #[case::youki("--systemd-log --log-level debug create --bundle /b c1")]
    // what runc takes since it uses urfave/cli v3
    #[case::global_options_after_the_command("create --log /l --root /r --bundle /b --pidfd-socket /s c1")]
    // what nobody knows
    #[case::an_unknown_switch("--new-switch create --bundle /b c1")]
    #[case::an_unknown_value("--new-option value create --bundle /b c1")]
    #[case::an_unknown_value_with_an_equals_sign("--new-option=create create --bundle /b c1")]
    #[case::an_unknown_letter("-X create --bundle /b c1")]
    #[case::two_unknown_ones("--new -X value create --bundle /b c1")]
    #[case::an_unknown_option_of_create("create --new value --bundle /b c1")]
    #[case::an_unknown_switch_of_create("create --new --bundle /b c1")]
    #[case::the_name_is_a_command("create --bundle /b run")]
    #[case::the_name_is_missing("create --bundle /b")]
    #[case::explained_too_late("create --bundle /b c1 --help")]
    fn the_bundle_is_found(#[case] line: &str) {
        assert_eq!(spec(line).as_deref(), Some("/b/config.json"));
    }

    #[rstest]
    #[case("create c1", "./config.json")]
    #[case("create --bundle= c1", "./config.json")]
    #[case("create --bundle", "./config.json")]
    #[case("run --bundle b c1", "b/config.json")]
    #[case("create --bundle /b --config /other.json c1", "/other.json")]
    #[case("create --bundle /b -f other.json c1", "other.json")]
    #[case("create --bundle /b --config config.json c1", "/b/config.json")]
    #[case("create --bundle /b --config= c1", "/b/config.json")]
    fn the_spec_is_where_the_runtime_reads_it(#[case] line: &str, #[case] path: &str) {
        assert_eq!(spec(line).as_deref(), Some(path));
    }

    #[rstest]
    #[case("")]
    #[case("--")]
    #[case("-")]
    #[case("--root")]
    #[case("--version")]
    #[case("-v")]
    #[case("--help")]
    #[case("--help create --bundle /b c1")]
    #[case("-h create --bundle /b c1")]
    #[case("--debug --version create --bundle /b c1")]
    #[case("create --help")]
    #[case("create -h --bundle /b c1")]
    #[case("create -help --bundle /b c1")]
    #[case("run --bundle /b --help c1")]
    #[case("help create")]
    #[case("features")]
    #[case("state create")]
    #[case("exec c1 create")]
    #[case("exec --process /p c1 create --bundle /b")]
    #[case("delete --force create")]
    #[case("--root create delete --force c1")]
    #[case("--log create start c1")]
    #[case("--new-switch start create")]
    #[case("--new-option value start create")]
    #[case("kill create KILL")]
    #[case("restore --bundle /b c1")]
    #[case("spec --bundle /b")]
    #[case("- create")]
    #[case("-- -- create")]
    #[case("creat --bundle /b c1")]
    #[case("CREATE --bundle /b c1")]
    fn nothing_else_is_a_create(#[case] line: &str) {
        assert_eq!(parse(&words(line)).call, Call::Other);
    }

    #[rstest]
    #[case("--log /l --log-format json create c1", Some("/l"), Format::Json)]
    #[case("--log=/l --log-format=text start c1", Some("/l"), Format::Text)]
    #[case("--log /l delete c1", Some("/l"), Format::Text)]
    #[case("--log file:/l start c1", Some("/l"), Format::Text)]
    #[case("--log journald:c1 start c1", None, Format::Text)]
    #[case("--log syslog:c1 start c1", None, Format::Text)]
    #[case("--log= start c1", None, Format::Text)]
    #[case("start c1", None, Format::Text)]
    fn the_log_is_found_for_every_command(
        #[case] line: &str,
        #[case] path: Option<&str>,
        #[case] format: Format,
    ) {
        assert_eq!(parse(&words(line)).log, Log { path: path.map(PathBuf::from), format });
    }

    #[test]
    fn what_is_not_utf8_survives() {
        let bundle = OsString::from_vec(b"/b\xff\xfe".to_vec());
        let apart = [OsString::from("create"), OsString::from("--bundle"), bundle.clone()];
        let together = [OsString::from("create"), OsString::from_vec(b"--bundle=/b\xff\xfe".to_vec())];
        let glued = [OsString::from("create"), OsString::from_vec(b"-b/b\xff\xfe".to_vec())];
        for line in [&apart[..], &together, &glued] {
            let Call::Create(found) = parse(line).call else { panic!("{line:?}") };
            assert_eq!(found.directory, bundle);
        }
    }

    #[test]
    fn the_table_names_every_option_once() {
        let mut names: Vec<&[u8]> = OPTIONS.iter().map(|option| option.name.as_bytes()).collect();
        names.extend(OPTIONS.iter().flat_map(|option| option.short.chunks(1)));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// Global options as engines and people write them, known and unknown, with values that look like anything.
    fn global() -> impl Strategy<Value = Vec<&'static str>> {
        prop::sample::select(vec![
            vec!["--root", "create"],
            vec!["--root=create"],
            vec!["--log", "--help"],
            vec!["--log-format", "json"],
            vec!["-root", "run"],
            vec!["--debug"],
            vec!["--debug=true"],
            vec!["--systemd-cgroup"],
            vec!["-s"],
            vec!["-r/x"],
            vec!["--rootless", "auto"],
            vec!["--new-option", "value"],
            vec!["--new-option=create"],
            vec!["--new-switch"],
        ])
    }

    proptest! {
        #[test]
        fn no_arguments_are_a_panic(words in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..8), 0..8)) {
            let words: Vec<OsString> = words.into_iter().map(OsString::from_vec).collect();
            parse(&words);
        }

        #[test]
        fn no_scrambled_arguments_are_a_panic(
            words in prop::collection::vec("(-|--)?(create|run|b|bundle|log|d|help|=|--)?(=[a-z/]?)?", 0..8)
        ) {
            parse(&words.into_iter().map(OsString::from).collect::<Vec<_>>());
        }

        #[test]
        fn whatever_precedes_it_another_command_is_no_create(
            globals in prop::collection::vec(global(), 0..5),
            command in prop::sample::select(vec!["start", "state", "kill", "delete", "exec", "features", "list"]),
            rest in prop::collection::vec("(create|run|--bundle|/b|-b|--)", 0..5),
        ) {
            let line: Vec<OsString> = globals
                .concat()
                .into_iter()
                .chain([command])
                .map(OsString::from)
                .chain(rest.into_iter().map(OsString::from))
                .collect();
            prop_assert_eq!(parse(&line).call, Call::Other);
        }

        #[test]
        fn whatever_precedes_it_a_create_is_one(globals in prop::collection::vec(global(), 0..5)) {
            let line: Vec<OsString> = globals
                .concat()
                .into_iter()
                .chain(["create", "--bundle", "/b", "c1"])
                .map(OsString::from)
                .collect();
            let bundle = Bundle { directory: "/b".into(), spec: "/b/config.json".into() };
            prop_assert_eq!(parse(&line).call, Call::Create(bundle));
        }
    }
}
