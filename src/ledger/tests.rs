use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;

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
    Container { id: id.to_owned(), bundle: "/b".into(), process, cgroup: Some("/x".to_owned()) }
}

#[test]
fn a_share_is_reserved_attached_and_released() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None).unwrap();
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
        host.book().reserve(share(1), alive(), None).unwrap();
    }
    for _ in 0..2 {
        host.book().attach(&token(1), container("c1", alive())).unwrap();
    }
    assert_eq!(host.names().len(), 1);
}

#[test]
fn one_share_is_never_two_containers() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None).unwrap();
    host.book().attach(&token(1), container("c1", alive())).unwrap();
    let error = host.book().attach(&token(1), container("c2", alive())).unwrap_err();
    assert!(error.to_string().contains("already belongs to the container c1"), "{error}");
    assert!(!host.book().release(&token(1), Some("c2")).unwrap(), "and c2's end does not give it back");
    assert!(!host.book().release(&token(1), None).unwrap());
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
        host.book().reserve(share(n), holder, None).unwrap();
    }
    host.book().attach(&token(3), container("c3", alive())).unwrap();
    host.book().attach(&token(4), container("c4", dead())).unwrap();
    assert_eq!(host.book().reap().unwrap(), 2);
    assert_eq!(host.names(), [token(1).to_string(), token(3).to_string()]);
}

#[test]
fn a_reservation_lapses_although_its_holder_lives() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), Some(Duration::ZERO)).unwrap();
    host.book().reserve(share(2), alive(), Some(Duration::from_secs(60))).unwrap();
    assert_eq!(host.book().reap().unwrap(), 1);
    assert_eq!(host.names(), [token(2).to_string()]);
}

#[test]
fn another_boots_ledger_is_empty_and_a_damaged_one_is_an_error() {
    let host = Host::new();
    host.book().reserve(share(1), alive(), None).unwrap();
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
    assert!(book.reserve(share(1), alive(), None).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(u8, bool),
    Attach(u8, bool),
    Release(u8),
    Reap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u8..6, any::<bool>()).prop_map(|(n, lives)| Step::Reserve(n, lives)),
        (0u8..6, any::<bool>()).prop_map(|(n, lives)| Step::Attach(n, lives)),
        (0u8..6).prop_map(Step::Release),
        Just(Step::Reap),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Against a model that knows of each token only whether it is reserved or attached, and whether that lives.
    #[test]
    fn any_order_of_steps_ends_where_the_model_ends(steps in steps()) {
        #[derive(Clone, Copy, PartialEq)]
        enum Model { Reserved(bool), Attached(bool) }
        let host = Host::new();
        let mut model: BTreeMap<u8, Model> = BTreeMap::new();
        let process = |lives: bool| if lives { alive() } else { dead() };
        for step in steps {
            match step {
                Step::Reserve(n, lives) => {
                    host.book().reserve(share(n), process(lives), None).unwrap();
                    model.insert(n, Model::Reserved(lives));
                }
                Step::Attach(n, lives) => {
                    let id = format!("c{n}{lives}");
                    let done = host.book().attach(&token(n), container(&id, process(lives))).is_ok();
                    let may = match model.get(&n) {
                        None => false,
                        Some(Model::Attached(true)) => lives,
                        Some(_) => true,
                    };
                    prop_assert_eq!(done, may);
                    if may { model.insert(n, Model::Attached(lives)); }
                }
                Step::Release(n) => {
                    let id = format!("c{n}{}", matches!(model.get(&n), Some(Model::Attached(true))));
                    let done = host.book().release(&token(n), Some(&id)).unwrap();
                    prop_assert_eq!(done, model.remove(&n).is_some());
                }
                Step::Reap => {
                    host.book().reap().unwrap();
                    model.retain(|_, entry| matches!(entry, Model::Reserved(true) | Model::Attached(true)));
                }
            }
            let mut names = host.names();
            names.sort();
            prop_assert_eq!(names, model.keys().map(|n| token(*n).to_string()).collect::<Vec<_>>());
        }
    }
}
