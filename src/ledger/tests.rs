use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::process::{Child, Command};

use proptest::prelude::*;

use super::*;
use crate::gpu::Uuid;
use crate::layout::{self, Owner as Whose};
use crate::quantity::{MemoryQuantity, Percentage};
use crate::share::GpuShare;
use crate::size::Priority;

struct Host {
    _directory: tempfile::TempDir,
    ledger: Ledger,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().to_owned();
        let layout = Layout::new(Whose::Root, |name| {
            (name == layout::env::STATE_DIR).then(|| state.clone().into_os_string())
        });
        Self { _directory: directory, ledger: Ledger::new(&layout) }
    }

    fn book(&self) -> Book {
        self.ledger.open().unwrap()
    }

    fn names(&self) -> Vec<String> {
        self.ledger.records().unwrap().into_iter().map(|record| record.share.token.to_string()).collect()
    }
}

fn token(n: u8) -> Token {
    Token::try_from(format!("{n:032x}")).unwrap()
}

fn share(n: u8) -> Share {
    Share {
        token: token(n),
        gpus: vec![GpuShare {
            gpu: Uuid::try_from("GPU-00000000-1111-2222-3333-444444444444".to_owned()).unwrap(),
            memory: MemoryQuantity::from_mib(1024),
        }],
        threads: Percentage::WHOLE,
        processes: NonZeroU32::MIN,
        priority: Priority::Normal,
    }
}

fn alive() -> Process {
    Process::this().unwrap()
}

fn dead() -> Process {
    Process { started: 0, ..alive() }
}

fn container(id: &str, process: Process) -> Container {
    Container {
        id: id.to_owned(),
        bundle: "/b".into(),
        process,
        cgroup: Some("/x".to_owned()),
        origin: Origin::default(),
    }
}

#[test]
fn a_share_is_reserved_attached_and_released() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None, None).unwrap();
    host.book().attach(&token(1), container("c1", alive())).unwrap();
    let record = host.ledger.records().unwrap().remove(0);
    assert_eq!(record.owner, Owner::Attached(container("c1", alive())));
    assert!(host.book().release(&token(1), Some("c1")).unwrap());
    assert!(!host.book().release(&token(1), Some("c1")).unwrap(), "already gone is no error");
    assert_eq!(host.names(), [""; 0]);
}

#[test]
fn each_step_may_be_taken_twice() {
    let host = Host::new();
    for _ in 0..2 {
        host.book().reserve(share(1), alive(), None, None).unwrap();
    }
    for _ in 0..2 {
        host.book().attach(&token(1), container("c1", alive())).unwrap();
    }
    assert_eq!(host.names().len(), 1);
}

#[test]
fn one_share_is_never_two_containers() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None, None).unwrap();
    host.book().attach(&token(1), container("c1", alive())).unwrap();
    let error = host.book().attach(&token(1), container("c2", alive())).unwrap_err();
    assert!(error.to_string().contains("already belongs to the container c1"), "{error}");
    assert!(!host.book().release(&token(1), Some("c2")).unwrap(), "and c2's end does not give it back");
    assert!(!host.book().release(&token(1), None).unwrap());
}

#[test]
fn a_container_whose_first_process_ended_before_the_others_still_has_its_share() {
    let host = Host::new();
    // this test's own cgroup stands for the container's, which its path names
    let cgroup = alive().cgroup().unwrap();
    let id = cgroup.rsplit('/').next().unwrap().to_owned();
    let left_behind = Container { cgroup: Some(cgroup), ..container(&id, dead()) };
    host.book().reserve(share(1), alive(), None, None).unwrap();
    host.book().attach(&token(1), left_behind).unwrap();
    assert_eq!(host.book().reap().unwrap(), 0);
    let error = host.book().attach(&token(1), container("c2", alive())).unwrap_err();
    assert!(error.to_string().contains("already belongs to the container"), "{error}");
    assert!(host.book().find(&token(1)).unwrap().unwrap().is_a_running_containers());
}

#[test]
fn a_container_that_is_started_again_in_its_old_cgroup_has_one_share() {
    let host = Host::new();
    let cgroup = alive().cgroup().unwrap();
    let id = cgroup.rsplit('/').next().unwrap().to_owned();
    let run = |process| Container { cgroup: Some(cgroup.clone()), ..container(&id, process) };
    host.book().reserve(share(1), alive(), None, None).unwrap();
    host.book().attach(&token(1), run(dead())).unwrap();
    host.book().reserve(share(2), alive(), None, None).unwrap();
    host.book().attach(&token(2), run(alive())).unwrap();
    assert_eq!(host.names(), [token(2).to_string()], "the new run's processes are no life of the old one's");
}

#[test]
fn what_is_not_reserved_cannot_be_attached() {
    let error = Host::new().book().attach(&token(1), container("c1", alive())).unwrap_err();
    assert!(error.to_string().contains("create the container anew"), "{error}");
}

#[test]
fn the_dead_are_reaped_and_the_living_stay() {
    let host = Host::new();
    for (n, holder) in [(1, alive()), (2, dead()), (3, alive()), (4, alive())] {
        host.book().reserve(share(n), holder, None, None).unwrap();
    }
    host.book().attach(&token(3), container("c3", alive())).unwrap();
    host.book().attach(&token(4), container("c4", dead())).unwrap();
    assert_eq!(host.book().reap().unwrap(), 2);
    assert_eq!(host.names(), [token(1).to_string(), token(3).to_string()]);
}

#[test]
fn a_reservation_lapses_although_its_holder_lives() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), Some(Duration::ZERO), None).unwrap();
    host.book().reserve(share(2), alive(), Some(Duration::from_secs(60)), None).unwrap();
    assert_eq!(host.book().reap().unwrap(), 1);
    assert_eq!(host.names(), [token(2).to_string()]);
}

#[test]
fn another_boots_ledger_is_empty_and_a_damaged_one_is_an_error() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None, None).unwrap();
    let text = fs::read_to_string(&host.ledger.file).unwrap();
    fs::write(&host.ledger.file, text.replace(&kernel::boot_id().unwrap(), "another")).unwrap();
    assert_eq!(host.names(), [""; 0]);
    fs::write(&host.ledger.file, "{").unwrap();
    let error = host.ledger.open().unwrap_err().to_string();
    assert!(error.contains("is damaged") && error.contains("can be removed"), "{error}");
}

#[test]
fn a_ledger_that_cannot_be_written_promises_nothing() {
    let host = Host::new();
    let mut book = host.book();
    fs::remove_dir_all(host.ledger.file.parent().unwrap()).unwrap();
    assert!(book.reserve(share(1), alive(), None, None).is_err());
}

#[test]
fn a_reservation_without_its_bundle_is_reaped() {
    let host = Host::new();
    let spec = host.ledger.file.with_file_name("config.json");
    fs::write(&spec, "{}").unwrap();
    host.book().reserve(share(1), alive(), None, Some(spec.clone())).unwrap();
    host.book().reserve(share(2), alive(), None, None).unwrap();
    assert_eq!(host.book().reap().unwrap(), 0);
    fs::remove_file(&spec).unwrap();
    assert_eq!(host.book().reap().unwrap(), 1);
    assert_eq!(host.names(), [token(2).to_string()]);
}

#[test]
fn a_running_container_keeps_its_share_without_its_bundle_and_for_any_time() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None, Some("/nonexistent/config.json".into())).unwrap();
    host.book().attach(&token(1), container("c1", alive())).unwrap();
    let text = fs::read_to_string(&host.ledger.file).unwrap();
    let since = host.ledger.records().unwrap()[0].since;
    fs::write(&host.ledger.file, text.replace(&since.to_string(), "1")).unwrap();
    assert_eq!(host.book().reap().unwrap(), 0);
}

#[test]
fn a_container_that_starts_again_never_has_two_shares() {
    let host = Host::new();
    let elsewhere = Container { bundle: "/other".into(), ..container("c1", dead()) };
    for (n, container) in [(1, container("c1", dead())), (2, elsewhere), (3, container("c1", alive()))] {
        host.book().reserve(share(n), alive(), None, None).unwrap();
        host.book().attach(&token(n), container).unwrap();
    }
    let left = [token(2).to_string(), token(3).to_string()];
    assert_eq!(host.names(), left, "another engine's container of that id is another one");
    assert!(
        !host.book().release(&token(1), Some("c1")).unwrap(),
        "a late poststop of the first takes nothing"
    );
    assert_eq!(host.names(), left);
}

#[test]
fn a_share_is_meant_by_id_beginning_name_or_token() {
    let host = Host::new();
    for (n, id, name) in [(1, "abcd", "train"), (2, "abef", "web")] {
        host.book().reserve(share(n), alive(), None, None).unwrap();
        let origin = Origin { name: Some(name.to_owned()), ..Origin::default() };
        host.book().attach(&token(n), Container { origin, ..container(id, alive()) }).unwrap();
    }
    let meant = |name: &str| -> Vec<Token> {
        host.book().meant_by(name).unwrap().into_iter().map(|record| record.share.token).collect()
    };
    assert_eq!(meant("abc"), [token(1)]);
    assert_eq!(meant("ab"), [token(1), token(2)]);
    assert_eq!(meant("web"), [token(2)]);
    assert_eq!(meant(token(2).as_str()), [token(2)]);
    assert_eq!(meant("attached"), []);
}

#[test]
fn what_is_cut_off_anywhere_is_damaged_and_never_half_a_ledger() {
    let host = Host::new();
    for n in 1..4 {
        host.book().reserve(share(n), alive(), None, None).unwrap();
    }
    let whole = fs::read(&host.ledger.file).unwrap();
    for length in 0..whole.len() - 1 {
        fs::write(&host.ledger.file, &whole[..length]).unwrap();
        assert!(
            matches!(host.ledger.open(), Err(LedgerError::Damaged { .. })),
            "{length} bytes are a ledger"
        );
    }
    fs::write(&host.ledger.file, &whole).unwrap();
    let as_json: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(as_json["shares"].as_array().unwrap().len(), 3, "it is JSON for everybody else");
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(u8, bool),
    Attach(u8, bool),
    Release(u8),
    Crash(u8),
    Reap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u8..6, any::<bool>()).prop_map(|(n, lives)| Step::Reserve(n, lives)),
        (0u8..6, any::<bool>()).prop_map(|(n, lives)| Step::Attach(n, lives)),
        (0u8..6).prop_map(Step::Release),
        (0u8..6).prop_map(Step::Crash),
        Just(Step::Reap),
    ];
    prop::collection::vec(step, 0..40)
}

/// Processes that can be killed, one for each token.
#[derive(Default)]
struct Processes(BTreeMap<u8, Child>);

impl Processes {
    fn of(&mut self, n: u8) -> Process {
        let child = self.0.entry(n).or_insert_with(|| Command::new("sleep").arg("60").spawn().unwrap());
        Process::find(child.id().cast_signed()).unwrap()
    }

    fn kill(&mut self, n: u8) {
        if let Some(mut child) = self.0.remove(&n) {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for n in 0..6 {
            self.kill(n);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Against a model that knows of each token only whether it is reserved or attached, and whether that lives.
    #[test]
    fn any_order_of_steps_ends_where_the_model_ends(steps in steps()) {
        #[derive(Clone, PartialEq)]
        enum Model { Reserved(bool), Attached(bool, String) }
        let host = Host::new();
        let mut model: BTreeMap<u8, Model> = BTreeMap::new();
        let mut processes = Processes::default();
        for step in steps {
            match step {
                Step::Reserve(n, lives) => {
                    let process = if lives { processes.of(n) } else { dead() };
                    host.book().reserve(share(n), process, None, None).unwrap();
                    model.insert(n, Model::Reserved(lives));
                }
                Step::Attach(n, lives) => {
                    let id = format!("c{n}{lives}");
                    let process = if lives { processes.of(n) } else { dead() };
                    let done = host.book().attach(&token(n), container(&id, process)).is_ok();
                    let may = match model.get(&n) {
                        None => false,
                        Some(Model::Attached(true, _)) => lives,
                        Some(_) => true,
                    };
                    prop_assert_eq!(done, may);
                    if may { model.insert(n, Model::Attached(lives, id)); }
                }
                Step::Release(n) => {
                    let id = match model.get(&n) {
                        Some(Model::Attached(_, id)) => id.clone(),
                        _ => format!("c{n}"),
                    };
                    let done = host.book().release(&token(n), Some(&id)).unwrap();
                    prop_assert_eq!(done, model.remove(&n).is_some());
                }
                Step::Crash(n) => {
                    processes.kill(n);
                    if let Some(Model::Reserved(lives) | Model::Attached(lives, _)) = model.get_mut(&n) {
                        *lives = false;
                    }
                }
                Step::Reap => {
                    host.book().reap().unwrap();
                    model.retain(|_, entry| matches!(entry, Model::Reserved(true) | Model::Attached(true, _)));
                }
            }
            let mut names = host.names();
            names.sort();
            prop_assert_eq!(names, model.keys().map(|n| token(*n).to_string()).collect::<Vec<_>>());
        }
    }
}
