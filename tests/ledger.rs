//! The ledger between processes that are killed, and between many at once. The workers are this program again.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use oci_mps::kernel::{self, Process};
use oci_mps::layout::{Layout, Owner};
use oci_mps::ledger::{Container, Ledger};
use oci_mps::origin::Origin;
use oci_mps::share::{Share, Token};

fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    if let [mode, directory] = words.as_slice()
        && let Some(mode) = mode.to_str().and_then(|mode| mode.strip_prefix("--worker-"))
    {
        work(mode, Path::new(directory));
        return ExitCode::SUCCESS;
    }
    let trials = vec![
        Trial::test("a_writer_killed_at_any_moment_loses_nothing_that_was_done", || {
            killed_writers();
            Ok::<(), Failed>(())
        }),
        Trial::test("many_processes_at_once_lose_and_double_nothing", || {
            many_at_once();
            Ok(())
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn ledger(directory: &Path) -> Ledger {
    Ledger::new(&Layout::new(Owner::Root, |name| (name == "OCI_MPS_STATE_DIR").then(|| directory.into())))
}

fn share(token: &Token) -> Share {
    serde_json::from_value(serde_json::json!({
        "token": token, "threads": 25_000, "processes": 1, "priority": "normal",
        "gpus": [{"gpu": "GPU-00000000-1111-2222-3333-444444444444", "memory_mib": 1024}],
    }))
    .unwrap()
}

fn new_token() -> Token {
    Token::try_from(kernel::random_token().unwrap()).unwrap()
}

fn worker(mode: &str, directory: &Path) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg(format!("--worker-{mode}")).arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// What a worker does: it says each step before it and after it.
fn work(mode: &str, directory: &Path) {
    let (ledger, parent) = (ledger(directory), Process::parent().unwrap());
    let say = |word: &str, token: &Token| println!("{word} {token}");
    let container = |id: &Token| Container {
        id: id.to_string(),
        bundle: PathBuf::from("/b"),
        process: parent,
        cgroup: None,
        origin: Origin::default(),
    };
    if mode == "once" {
        // until all of them are there
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }
    let steps = if mode == "once" { 10 } else { usize::MAX };
    for _ in 0..steps {
        let (kept, given_back) = (new_token(), new_token());
        for token in [&kept, &given_back] {
            say("reserves", token);
            ledger.open().unwrap().reserve(share(token), parent, None, None).unwrap();
            say("reserved", token);
            ledger.open().unwrap().attach(token, container(token)).unwrap();
            say("attached", token);
        }
        say("releases", &given_back);
        assert!(ledger.open().unwrap().release(&given_back, Some(given_back.as_str())).unwrap());
        say("released", &given_back);
    }
}

/// What must be in the ledger by what a worker said, and what may be.
fn told(said: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut must, mut may) = (BTreeSet::new(), BTreeSet::new());
    // its last line may have been cut off with it
    let whole = said.rsplit_once('\n').map_or("", |(whole, _)| whole);
    for (word, token) in whole.lines().filter_map(|line| line.split_once(' ')) {
        let token = token.to_owned();
        match word {
            "reserves" => {
                may.insert(token);
            }
            "reserved" | "attached" => {
                must.insert(token);
            }
            "releases" => {
                must.remove(&token);
            }
            _ => {
                may.remove(&token);
            }
        }
    }
    (must, may)
}

fn killed_writers() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = ledger(directory.path());
    let (mut all_must, mut all_may) = (BTreeSet::new(), BTreeSet::new());
    let mut wrote = 0;
    for round in 0u64..100 {
        let mut child = worker("on", directory.path());
        // spread over the milliseconds in which it starts and goes through some rounds
        thread::sleep(Duration::from_micros(1500 + round * 137 % 9000));
        child.kill().unwrap();
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        child.wait().unwrap();
        let (must, may) = told(&said);
        wrote += usize::from(!must.is_empty());
        all_must.extend(must);
        all_may.extend(may);
        let there: BTreeSet<String> =
            ledger.records().unwrap().into_iter().map(|record| record.share.token.to_string()).collect();
        assert!(all_must.is_subset(&there), "round {round}: lost {:?}", all_must.difference(&there));
        assert!(there.is_subset(&all_may), "round {round}: came back {:?}", there.difference(&all_may));
        // what was under way is decided now, and the killed one's lock is nobody's
        let extra: Vec<String> = there.difference(&all_must).cloned().collect();
        for token in extra {
            let token = Token::try_from(token).unwrap();
            assert!(ledger.open().unwrap().forget(&token).unwrap());
            all_may.remove(token.as_str());
        }
        if there.len() > 60 {
            for token in std::mem::take(&mut all_must) {
                assert!(ledger.open().unwrap().forget(&Token::try_from(token).unwrap()).unwrap());
            }
            all_may.clear();
        }
    }
    assert!(wrote > 20, "only {wrote} of 100 workers lived long enough to write");
    let beside: BTreeSet<String> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    let known = ["shares.json", "shares.lock", "shares.next"];
    assert!(beside.iter().all(|name| known.contains(&name.as_str())), "left by the killed: {beside:?}");
}

fn many_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut children: Vec<Child> = (0..24).map(|_| worker("once", directory.path())).collect();
    for child in &mut children {
        drop(child.stdin.take());
    }
    let mut expected = BTreeSet::new();
    for mut child in children {
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success());
        let (must, may) = told(&said);
        assert_eq!(must, may);
        assert_eq!(must.len(), 10);
        expected.extend(must);
    }
    let records = ledger(directory.path()).records().unwrap();
    let there: Vec<String> = records.into_iter().map(|record| record.share.token.to_string()).collect();
    assert_eq!(there.len(), 240, "24 processes kept 10 each");
    assert_eq!(there.into_iter().collect::<BTreeSet<_>>(), expected);
}
