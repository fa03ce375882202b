//! The house's walls: which room may use which. `src/lib.rs` draws the rooms in this order.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A room, and the rooms that it may use.
const ROOMS: &[(&str, &[&str])] = &[
    ("quantity", &[]),
    ("file", &[]),
    ("layout", &[]),
    // whose instance this is decides where things are
    ("kernel", &["layout"]),
    ("gpu", &["quantity"]),
    ("size", &["quantity", "gpu"]),
    ("share", &["quantity", "gpu", "size"]),
    ("origin", &[]),
    ("config", &["quantity", "file", "gpu", "size"]),
    ("request", &["layout", "size", "config"]),
    ("spec", &[]),
    ("plan", &["quantity", "layout", "gpu", "size", "share", "config", "request", "spec"]),
    ("inventory", &["quantity", "file", "layout", "kernel", "gpu", "config"]),
    ("control", &["quantity", "file", "layout", "gpu", "size"]),
    ("ledger", &["file", "layout", "kernel", "share", "origin"]),
    ("daemon", &["file", "layout", "kernel", "config", "control"]),
    (
        "inject",
        &[
            "layout",
            "kernel",
            "gpu",
            "share",
            "config",
            "request",
            "spec",
            "plan",
            "inventory",
            "ledger",
            "daemon",
        ],
    ),
    ("entry", &["file", "layout", "kernel", "config", "share", "origin", "ledger", "daemon", "inject"]),
    (
        "cli",
        &[
            "quantity",
            "file",
            "layout",
            "kernel",
            "gpu",
            "share",
            "origin",
            "config",
            "inventory",
            "control",
            "ledger",
            "daemon",
            "inject",
            "entry",
        ],
    ),
];

/// Entries stand beside each other: what two of them need is a room below, or one of these.
const ENTRIES_MAY_USE: &[&str] = &["report", "programs"];

#[test]
fn no_room_uses_one_that_it_may_not() {
    let mut wrong = Vec::new();
    for (room, may) in ROOMS {
        for file in files_of(room) {
            for used in used_rooms(&fs::read_to_string(&file).unwrap()) {
                if used != *room && !may.contains(&used.as_str()) {
                    wrong.push(format!("{} uses {used}, which {room} may not", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn no_room_may_use_what_it_does_not() {
    for (room, may) in ROOMS {
        let used: BTreeSet<String> =
            files_of(room).iter().flat_map(|file| used_rooms(&fs::read_to_string(file).unwrap())).collect();
        for allowed in *may {
            assert!(used.contains(*allowed), "{room} does not use {allowed}: take it out of the table");
        }
    }
}

#[test]
fn every_room_uses_only_rooms_above_it_and_every_room_is_drawn() {
    let order: Vec<&str> = ROOMS.iter().map(|(room, _)| *room).collect();
    for (position, (room, may)) in ROOMS.iter().enumerate() {
        assert!(may.iter().all(|used| order[..position].contains(used)), "{room} looks down");
    }
    let house = fs::read_to_string("src/lib.rs").unwrap();
    let drawn: Vec<&str> =
        house.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert_eq!(drawn, order, "src/lib.rs and this table draw the same house");
}

#[test]
fn entries_never_use_one_another() {
    for file in rust_files(Path::new("src/entry")) {
        let own = file.strip_prefix("src/entry").unwrap().components().next().unwrap();
        let own = own.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned();
        let text = fs::read_to_string(&file).unwrap();
        for used in names_after(&text, "crate::entry::").into_iter().filter(|used| *used != own) {
            assert!(ENTRIES_MAY_USE.contains(&used.as_str()), "{} uses {used}", file.display());
        }
    }
}

#[test]
fn the_decision_sees_no_effects() {
    for file in files_of("plan") {
        let text = fs::read_to_string(&file).unwrap();
        for effect in ["std::fs", "std::process", "std::env", "std::time", "std::net", "tracing", "println!"]
        {
            assert!(!text.contains(effect), "{} uses {effect}", file.display());
        }
    }
}

fn files_of(room: &str) -> Vec<PathBuf> {
    let (file, folder) = (PathBuf::from(format!("src/{room}.rs")), PathBuf::from(format!("src/{room}")));
    let files: Vec<PathBuf> =
        [file].into_iter().filter(|file| file.exists()).chain(rust_files(&folder)).collect();
    assert!(!files.is_empty(), "there is no room {room}");
    files
}

/// The programs of a folder. Unit tests, in files of their own, may look wherever they like.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| !path.ends_with("tests"))
        .flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|kind| kind == "rs") && !path.ends_with("tests.rs"))
        .collect()
}

fn used_rooms(text: &str) -> BTreeSet<String> {
    names_after(text, "crate::")
}

/// The first name after each `start` in what is compiled into the programs: no comments, no unit tests.
fn names_after(text: &str, start: &str) -> BTreeSet<String> {
    let program = text.split("\n#[cfg(test)]").next().unwrap_or_default();
    let lines = program.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines
        .flat_map(|line| line.split(start).skip(1).map(str::to_owned).collect::<Vec<_>>())
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(group) => group.split([',', '}']).map(|name| name.trim().to_owned()).collect(),
            None => vec![rest],
        })
        .map(|rest| rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect::<String>())
        .filter(|name| !name.is_empty())
        .collect()
}
