//! The one path of a container that asks: its spec, its request, what the host has, the plan, the reservation, the
//! edited spec. The runtime, podman's hook and `explain` all walk it; only they know where the spec comes from.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memchr::memmem;

use crate::config::{ConfigError, HostConfig};
use crate::daemon::{Daemon, DaemonError};
use crate::gpu::Inventory;
use crate::inventory::{self, InventoryError};
use crate::kernel::{self, Process};
use crate::layout::{Layout, SYSTEM_PATH, TOKEN_ANNOTATION, env};
use crate::ledger::{Book, Ledger, LedgerError, Record};
use crate::plan::{Facts, Plan, Refusal, Site, plan};
use crate::request::{Request, RequestError};
use crate::share::{Share, Token, TokenError};
use crate::spec::{Document, SpecError};

/// Where all this happens.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The host's paths.
    pub layout: Layout,
    /// The programs that are needed on the way, or why they are not there. Who does not ask needs none of them.
    pub programs: Result<Programs, String>,
    /// Who makes the container. Should this process end before there is one, the share is free again.
    pub holder: Process,
    /// When the share is free again although that process lives on, as an engine's service does.
    pub lapses_after: Option<Duration>,
    /// The file that the container is made from, where it is one: without it there will be no container either.
    pub spec: Option<PathBuf>,
}

/// Programs of oci-mps, by their absolute paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// `oci-mps`, which finds the GPUs where nobody did before.
    pub oci_mps: PathBuf,
    /// What the container's hooks run.
    pub hooks: PathBuf,
}

/// What became of a spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It does not ask.
    NotOurs,
    /// It asks, and already says all that it must.
    Unchanged,
    /// It asks, and was written anew.
    Edited,
}

/// What would become of a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Preview {
    /// The document as it is.
    pub before: Document,
    /// The document as it would be.
    pub after: Document,
    /// The share and the edits.
    pub plan: Plan,
    /// The GPUs that it was decided from.
    pub inventory: Inventory,
}

/// Why a container that asks is not made.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Its document cannot be read or edited.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The host's configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its annotations are not clear.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Nobody knows the GPUs.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// The host does not give what it asks for.
    #[error(transparent)]
    Plan(#[from] Refusal),
    /// There is no MPS to be a client of.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The share cannot be written down.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// It carries what only oci-mps writes.
    #[error("{TOKEN_ANNOTATION}: {0}")]
    Token(#[from] TokenError),
    /// The installation is incomplete.
    #[error("{0}")]
    Programs(String),
    /// The kernel does not answer.
    #[error("cannot name the share: {0}")]
    Kernel(#[source] io::Error),
    /// The edited document cannot be put in its place.
    #[error("cannot write the edited config.json: {0}; nothing was changed")]
    Write(#[source] io::Error),
}

/// Whether there may be anything for us in these bytes. A byte search, so that a container that does not ask costs
/// nothing; a key may be written with JSON escapes, and then the document has to be parsed to know.
pub fn concerns(document: &[u8]) -> bool {
    const WORDS: [&str; 4] = ["oci-mps", "OCI-MPS", "nvidia.com", "aliyun.com"];
    WORDS.iter().any(|word| memmem::find(document, word.as_bytes()).is_some()) || escapes_a_key(document)
}

/// Whether a character that our keys are made of is written as `\u00XX`. Engines escape `<`, `>` and `&` only.
fn escapes_a_key(document: &[u8]) -> bool {
    memmem::find_iter(document, br"\u00").any(|at| {
        let digits = document.get(at + 4..at + 6).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'/'))
    })
}

/// Gives a container its share: decides, makes sure of the daemon, reserves, and hands the edited document to `put`.
///
/// # Errors
/// A refusal. Nothing is then reserved, and `put` was not called or failed.
pub fn inject(
    original: &[u8],
    setting: &Setting,
    put: impl FnOnce(&[u8]) -> io::Result<()>,
) -> Result<Outcome, Refused> {
    let Some(mut ground) = Ground::of(original, &setting.layout)? else { return Ok(Outcome::NotOurs) };
    let programs = setting.programs.as_ref().map_err(|missing| Refused::Programs(missing.clone()))?;
    let daemon = Daemon::new(&setting.layout, &ground.config.daemon);
    daemon.trusts_its_directories()?;
    let inventory = inventory::current(&setting.layout, &ground.config, &programs.oci_mps)?;
    let site = site(setting, programs);
    let ledger = Ledger::new(&setting.layout);
    if daemon.process()?.is_none() {
        // a refusal comes before anything has been changed, the start of a daemon included
        ground.preview(&inventory, &site, &ledger)?;
    }
    daemon.ready()?;

    let mut book = ledger.open()?;
    let mut token = ground.token(|token| Ok(book.find(token)?))?;
    let mut plan = ground.decide(&inventory, &site, &token, &mut book)?;
    if book.find(&token)?.is_some_and(|record| record.is_live() && record.share != plan.share) {
        // a token that was copied from somebody who asked for something else
        token = new_token()?;
        plan = ground.decide(&inventory, &site, &token, &mut book)?;
    }
    ground.document.apply(&plan.edits)?;
    let edited = ground.document.to_bytes();
    book.reserve(plan.share, setting.holder, setting.lapses_after, setting.spec.clone())?;
    if edited == original {
        return Ok(Outcome::Unchanged);
    }
    // who reads the document may take its time, and others are waiting
    drop(book);
    match put(&edited) {
        Ok(()) => Ok(Outcome::Edited),
        Err(error) => {
            ledger.open()?.release(&token, None)?;
            Err(Refused::Write(error))
        }
    }
}

/// What [`inject`] would do now, without doing any of it. `None`: the container does not ask.
///
/// # Errors
/// The refusal that the container would get, as far as it does not depend on the daemon.
pub fn preview(original: &[u8], setting: &Setting) -> Result<Option<Preview>, Refused> {
    let Some(ground) = Ground::of(original, &setting.layout)? else { return Ok(None) };
    let programs = setting.programs.as_ref().map_err(|missing| Refused::Programs(missing.clone()))?;
    Daemon::new(&setting.layout, &ground.config.daemon).trusts_its_directories()?;
    let inventory = inventory::current(&setting.layout, &ground.config, &programs.oci_mps)?;
    let plan = ground.preview(&inventory, &site(setting, programs), &Ledger::new(&setting.layout))?;
    let mut after = ground.document.clone();
    after.apply(&plan.edits)?;
    Ok(Some(Preview { before: ground.document, after, plan, inventory }))
}

/// What a container brings, and what its host's administrator decided.
struct Ground {
    document: Document,
    request: Request,
    config: HostConfig,
}

impl Ground {
    fn of(original: &[u8], layout: &Layout) -> Result<Option<Self>, Refused> {
        let document = Document::parse(original)?;
        let annotations = document.annotations()?;
        // who has no annotation that could be ours must not notice a broken configuration
        if !annotations.iter().any(|(key, _)| concerns(key.as_bytes())) {
            return Ok(None);
        }
        let config = HostConfig::load(layout.config())?;
        let request = Request::read(&annotations, config.aliases)?;
        Ok(request.map(|request| Self { document, request, config }))
    }

    /// The token that the document carries; a new one where it carries none, or that of a container that runs: then
    /// the document is a copy.
    fn token(&self, find: impl FnOnce(&Token) -> Result<Option<Record>, Refused>) -> Result<Token, Refused> {
        if let Some(token) = self.document.annotation(TOKEN_ANNOTATION) {
            let token = Token::try_from(token.to_owned())?;
            let is_anothers = find(&token)?.is_some_and(|record| record.is_a_running_containers());
            if !is_anothers {
                return Ok(token);
            }
        }
        new_token()
    }

    /// Decides under the ledger's lock. Where there is no room, what nobody will give back is dropped first.
    fn decide(
        &self,
        inventory: &Inventory,
        site: &Site,
        token: &Token,
        book: &mut Book,
    ) -> Result<Plan, Refused> {
        let decide = |book: &Book| -> Result<Result<Plan, Refusal>, LedgerError> {
            let held = book.find(token)?.map(|record| record.share);
            Ok(self.plan(inventory, site, token, &book.others(token), held.as_ref()))
        };
        let mut decided = decide(book)?;
        if matches!(decided, Err(Refusal::NoRoom { .. })) && book.reap()? > 0 {
            decided = decide(book)?;
        }
        decided.map_err(|refusal| named(refusal, |token| Some(book.find(token).ok()??.holder_name())).into())
    }

    /// Decides from a look at the ledger.
    fn preview(&self, inventory: &Inventory, site: &Site, ledger: &Ledger) -> Result<Plan, Refused> {
        let records: Vec<Record> = ledger.records()?.into_iter().filter(Record::is_live).collect();
        let find = |token: &Token| records.iter().find(|record| record.share.token == *token);
        let token = self.token(|token| Ok(find(token).cloned()))?;
        let held = find(&token).map(|record| &record.share);
        let others: Vec<&Share> =
            records.iter().map(|record| &record.share).filter(|share| share.token != token).collect();
        self.plan(inventory, site, &token, &others, held)
            .map_err(|refusal| named(refusal, |token| Some(find(token)?.holder_name())).into())
    }

    fn plan(
        &self,
        inventory: &Inventory,
        site: &Site,
        token: &Token,
        others: &[&Share],
        held: Option<&Share>,
    ) -> Result<Plan, Refusal> {
        plan(
            &self.document,
            &self.request,
            Facts { config: &self.config, inventory, others, held, token, site },
        )
    }
}

fn new_token() -> Result<Token, Refused> {
    Ok(Token::try_from(kernel::random_token().map_err(Refused::Kernel)?)?)
}

/// The refusal with the names of those who have what is asked for.
fn named(mut refusal: Refusal, name: impl Fn(&Token) -> Option<String>) -> Refusal {
    if let Refusal::NoRoom { shortages, .. } = &mut refusal {
        for holder in shortages.iter_mut().flat_map(|shortage| &mut shortage.holders) {
            holder.name = name(&holder.token).unwrap_or_default();
        }
    }
    refusal
}

fn site(setting: &Setting, programs: &Programs) -> Site {
    let variable = |name: &str, path: &Path| format!("{name}={}", path.display());
    Site {
        client_dir: setting.layout.client(),
        hook_program: programs.hooks.clone(),
        hook_env: vec![
            format!("PATH={SYSTEM_PATH}"),
            variable(env::STATE_DIR, setting.layout.state()),
            variable(env::CONFIG, setting.layout.config()),
        ],
        has_message_queues: Path::new("/dev/mqueue").is_dir(),
        in_user_namespace: kernel::is_in_user_namespace(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(r#"{"annotations":{"oci-mps/memory":"8GiB"}}"#, true)]
    #[case(r#"{"annotations":{"oci-mps\/memory":"8GiB"}}"#, true)]
    #[case(r#"{"annotations":{"oci\u002dmps/memory":"8GiB"}}"#, true)]
    #[case(r#"{"annotations":{"oci-mp\u0073/memory":"8GiB"}}"#, true)]
    #[case(r#"{"annotations":{"nvidia.com/gpumem":"8"}}"#, true)]
    #[case(r#"{"annotations":{"aliyun.com/gpu-mem":"8"}}"#, true)]
    #[case(r#"{"process":{"args":["sh","-c","a \u0026\u0026 b \u003e c\u2028\u0000"]}}"#, false)]
    #[case(r#"{"annotations":{}}"#, false)]
    #[case(r"\u00", false)]
    fn the_fast_path_passes_only_who_cannot_mean_us(#[case] document: &str, #[case] concerned: bool) {
        assert_eq!(concerns(document.as_bytes()), concerned);
    }
}
