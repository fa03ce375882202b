//! The host's configuration: `/etc/oci-mps/config.toml` to [`HostConfig`]. No file is the same as an empty one.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use crate::file;
use crate::gpu::{Gpu, Selector};
use crate::quantity::MemoryQuantity;
use crate::size::{Field, Ipc, Size};

/// What the administrator decided, or the defaults of the contract.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostConfig {
    /// The program behind `oci-mps-runtime`.
    pub runtime: Runtime,
    /// The MPS control daemon.
    pub daemon: Daemon,
    /// Where the GPUs are known from.
    pub inventory: Source,
    /// Which of them are ours.
    pub gpus: Gpus,
    /// What containers look like.
    pub container: Container,
    /// What a container's annotations leave out.
    #[serde(deserialize_with = "size")]
    pub defaults: Size,
    /// Sizes by name.
    #[serde(deserialize_with = "sizes")]
    pub profiles: BTreeMap<String, Size>,
    /// Who may have how much.
    pub policy: Policy,
    /// Other systems' annotations.
    pub aliases: Aliases,
}

/// `[runtime]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Names or paths; the first one that is found becomes the real runtime.
    #[serde(deserialize_with = "one_or_many")]
    pub path: Vec<PathBuf>,
}

/// `[daemon]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Daemon {
    /// The control program: a path, or a name that is looked up in system directories.
    pub control: PathBuf,
    /// Who starts it.
    pub start: Start,
    /// What becomes of the GPUs' compute mode.
    #[serde(deserialize_with = "compute_mode")]
    pub compute_mode: ComputeMode,
    /// Whether clients of different users may run at once, where the driver knows how.
    pub multi_user: bool,
}

/// Who starts the control daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Start {
    /// The first container that needs it.
    OnDemand,
    /// Somebody else; a container that comes before is refused.
    Service,
}

/// What becomes of the GPUs' compute mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeMode {
    /// It stays as it is.
    Keep,
}

/// `[inventory]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Source {
    /// Who knows the GPUs.
    pub source: SourceKind,
    /// The file that says so, where `source = "file"`.
    pub file: PathBuf,
}

/// Who knows the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// The driver, through its management library.
    Nvml,
    /// A file.
    File,
}

/// `[container]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Container {
    /// Whose IPC namespace, where the container does not say.
    pub ipc: Ipc,
    /// Where the client directory is in the container.
    #[serde(deserialize_with = "absolute")]
    pub pipe_dir: PathBuf,
    /// Who brings the device nodes and libraries.
    #[serde(deserialize_with = "inject")]
    pub inject: Inject,
}

/// Who brings the device nodes and libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// The engine.
    None,
}

/// `[gpus]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpus {
    /// Those that are shared, by index, UUID or the beginning of one; the others are set apart and no container gets
    /// them from here. Where nothing is said, all.
    #[serde(deserialize_with = "selectors")]
    pub managed: Option<Vec<Selector>>,
}

impl Gpus {
    /// Whether this GPU is shared.
    pub fn manages(&self, gpu: &Gpu) -> bool {
        self.managed.as_ref().is_none_or(|managed| managed.iter().any(|selector| selector.matches(gpu)))
    }
}

/// `[policy]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// How much of the memory may be promised, as a factor of at least 1.
    #[serde(deserialize_with = "factor")]
    pub memory_overcommit: f64,
    /// Whether the ceilings on threads may add up to more than 100 percent.
    pub threads_overcommit: bool,
    /// How many slices a GPU is cut into.
    pub slices: NonZeroU32,
    /// Kept back on each GPU, for the server and contexts.
    #[serde(deserialize_with = "memory")]
    pub reserve: MemoryQuantity,
    /// Whether containers may name profiles only.
    pub only_profiles: bool,
    /// Which of the GPUs with room is taken.
    pub placement: Placement,
    /// What is different on certain GPUs: `[policy.gpu.0]`, `[policy.gpu.GPU-1a2b]`.
    #[serde(deserialize_with = "gpu_policies")]
    pub gpu: Vec<(Selector, GpuPolicy)>,
}

/// `[policy.gpu.…]`: what is not said there is as `[policy]` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuPolicy {
    /// See [`Policy::memory_overcommit`].
    #[serde(deserialize_with = "some_factor")]
    pub memory_overcommit: Option<f64>,
    /// See [`Policy::threads_overcommit`].
    pub threads_overcommit: Option<bool>,
    /// See [`Policy::slices`].
    pub slices: Option<NonZeroU32>,
    /// See [`Policy::reserve`].
    #[serde(deserialize_with = "some_memory")]
    pub reserve: Option<MemoryQuantity>,
}

/// What counts on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// See [`Policy::memory_overcommit`].
    pub memory_overcommit: f64,
    /// See [`Policy::threads_overcommit`].
    pub threads_overcommit: bool,
    /// See [`Policy::slices`].
    pub slices: NonZeroU32,
    /// See [`Policy::reserve`].
    pub reserve: MemoryQuantity,
}

/// Which of the GPUs with room is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The one that is left with the least.
    Pack,
    /// The one that is left with the most.
    Spread,
}

/// `[aliases]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Aliases {
    /// `nvidia.com/gpu`, `nvidia.com/gpumem`, …
    pub hami: bool,
    /// `aliyun.com/gpu-mem`
    pub ack: bool,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There, but not readable.
    #[error("cannot read the configuration {}: {source}; mend it, or name another one with OCI_MPS_CONFIG", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// Not what the contract describes; the parser's message names the line.
    #[error("the configuration {} is not understood: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line, and what is wrong in it.
        message: String,
    },
}

impl HostConfig {
    /// Reads the host's configuration; where there is no such file, the defaults.
    ///
    /// # Errors
    /// Where there is a file that cannot be read or understood: a container that asks for a share is then refused,
    /// since nobody knows what the administrator meant.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let bytes = match file::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(ConfigError::Read { path: path.to_owned(), source }),
            Ok(bytes) => bytes,
        };
        String::from_utf8(bytes)
            .map_err(|error| error.to_string())
            .and_then(|text| Self::parse(&text))
            .map_err(|message| ConfigError::Parse { path: path.to_owned(), message })
    }

    /// Understands the text of a configuration.
    ///
    /// # Errors
    /// What is wrong, with its line.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())
    }
}

impl Default for Runtime {
    fn default() -> Self {
        Self { path: ["runc", "crun", "youki"].map(PathBuf::from).to_vec() }
    }
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            control: PathBuf::from("nvidia-cuda-mps-control"),
            start: Start::OnDemand,
            compute_mode: ComputeMode::Keep,
            multi_user: true,
        }
    }
}

impl Default for Source {
    fn default() -> Self {
        Self { source: SourceKind::Nvml, file: PathBuf::from("/etc/oci-mps/gpus.toml") }
    }
}

impl Default for Container {
    fn default() -> Self {
        Self { ipc: Ipc::Host, pipe_dir: PathBuf::from("/run/oci-mps"), inject: Inject::None }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            memory_overcommit: 1.0,
            threads_overcommit: true,
            slices: NonZeroU32::MIN.saturating_add(3),
            reserve: MemoryQuantity::from_mib(512),
            only_profiles: false,
            placement: Placement::Pack,
            gpu: Vec::new(),
        }
    }
}

impl Default for Aliases {
    fn default() -> Self {
        Self { hami: true, ack: true }
    }
}

/// A value of a size: people write `threads = 25` as readily as `threads = "25%"`.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text or a number")]
enum Value {
    Text(String),
    Integer(i64),
    Decimal(f64),
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
    parse_size(BTreeMap::deserialize(deserializer)?)
}

fn sizes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Size>, D::Error> {
    let profiles = BTreeMap::<String, BTreeMap<String, Value>>::deserialize(deserializer)?;
    profiles.into_iter().map(|(name, values)| Ok((name, parse_size(values)?))).collect()
}

fn parse_size<E: serde::de::Error>(values: BTreeMap<String, Value>) -> Result<Size, E> {
    let mut size = Size::default();
    for (name, value) in values {
        let field = Field::named(&name).ok_or_else(|| {
            let known = Field::ALL.map(Field::name).join(", ");
            E::custom(format!("unknown field `{name}`, expected one of {known}"))
        })?;
        size.set(field, &value.text()).map_err(|error| E::custom(format!("{name}: {error}")))?;
    }
    Ok(size)
}

fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a path or a list of paths")]
    enum Paths {
        One(PathBuf),
        Many(Vec<PathBuf>),
    }
    match Paths::deserialize(deserializer)? {
        Paths::One(path) => Ok(vec![path]),
        Paths::Many(paths) if paths.is_empty() => Err(D::Error::custom("name at least one runtime")),
        Paths::Many(paths) => Ok(paths),
    }
}

// Two settings of the contract have one value each so far. The other one is named, since who writes it relies on it.

fn compute_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ComputeMode, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "keep" => Ok(ComputeMode::Keep),
        "exclusive" => Err(D::Error::custom(
            "\"exclusive\" is not built yet: set it with 'nvidia-smi -c EXCLUSIVE_PROCESS' and write \"keep\"",
        )),
        other => Err(D::Error::unknown_variant(other, &["keep", "exclusive"])),
    }
}

fn inject<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Inject, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "none" => Ok(Inject::None),
        "cdi" => Err(D::Error::custom(
            "\"cdi\" is not built yet: let the engine bring the devices (--gpus, --device nvidia.com/gpu=…) and write \
             \"none\"",
        )),
        other => Err(D::Error::unknown_variant(other, &["none", "cdi"])),
    }
}

fn absolute<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(deserializer)?;
    if path.is_absolute() { Ok(path) } else { Err(D::Error::custom("must be an absolute path")) }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MemoryQuantity, D::Error> {
    let text = String::deserialize(deserializer)?;
    if matches!(text.as_str(), "0" | "0MiB" | "0GiB") {
        return Ok(MemoryQuantity::ZERO);
    }
    text.parse().map_err(D::Error::custom)
}

fn factor<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let factor = f64::deserialize(deserializer)?;
    if (1.0..=100.0).contains(&factor) {
        Ok(factor)
    } else {
        Err(D::Error::custom("must be between 1.0 and 100.0"))
    }
}

fn selectors<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Selector>>, D::Error> {
    let names = Vec::<Value>::deserialize(deserializer)?;
    names.iter().map(|name| name.text().parse().map_err(D::Error::custom)).collect::<Result<_, _>>().map(Some)
}

fn gpu_policies<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Selector, GpuPolicy)>, D::Error> {
    let policies = BTreeMap::<String, GpuPolicy>::deserialize(deserializer)?;
    let named = |(name, policy): (String, GpuPolicy)| Ok((name.parse().map_err(D::Error::custom)?, policy));
    let policies: Vec<(Selector, GpuPolicy)> = policies.into_iter().map(named).collect::<Result<_, _>>()?;
    Ok(policies)
}

fn some_factor<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    factor(deserializer).map(Some)
}

fn some_memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MemoryQuantity>, D::Error> {
    memory(deserializer).map(Some)
}

impl Value {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Integer(number) => number.to_string(),
            Self::Decimal(number) => number.to_string(),
        }
    }
}

impl Policy {
    /// What counts on that GPU. Where its index and its UUID both have a word, the UUID's comes first, and of two
    /// beginnings of it the longer one.
    pub fn on(&self, gpu: &Gpu) -> Terms {
        let mut own: Vec<&(Selector, GpuPolicy)> =
            self.gpu.iter().filter(|(selector, _)| selector.matches(gpu)).collect();
        own.sort_by_key(|(selector, _)| match selector {
            Selector::Uuid(beginning) => std::cmp::Reverse(beginning.len()),
            Selector::Index(_) => std::cmp::Reverse(0),
        });
        Terms {
            memory_overcommit: first(&own, |policy| policy.memory_overcommit, self.memory_overcommit),
            threads_overcommit: first(&own, |policy| policy.threads_overcommit, self.threads_overcommit),
            slices: first(&own, |policy| policy.slices, self.slices),
            reserve: first(&own, |policy| policy.reserve, self.reserve),
        }
    }
}

/// The first of the GPU's own policies that says it, else what is said in general.
fn first<T>(own: &[&(Selector, GpuPolicy)], of: impl Fn(&GpuPolicy) -> Option<T>, general: T) -> T {
    own.iter().find_map(|(_, policy)| of(policy)).unwrap_or(general)
}

impl Terms {
    /// How much of a GPU may be promised in amounts: what the reserve leaves, times the factor.
    pub fn shareable(&self, memory: MemoryQuantity) -> MemoryQuantity {
        self.overcommitted(memory.minus(self.reserve))
    }

    /// How much of a GPU may be promised when the next one to come asks for slices: all of it, times the factor.
    ///
    /// A slice is the GPU's memory over their number (Cloudpods' `virtual_number`; 5,760 MiB of a P40's 23,040 with
    /// four), so with a reserve beside them the last slice would never fit and three would be all there is. The
    /// reserve is kept from *amounts*, where nobody has said how the card is divided. Who divides it into slices has
    /// said so, down to the last MiB; what the server itself takes (66 MiB on an H200) then comes out of what the
    /// slices do not use, as a context comes out of its own client's limit. Slices and amounts on one card add up:
    /// with the factor 1, never to more than the card, and an amount never reaches into the reserve.
    pub fn sliceable(&self, memory: MemoryQuantity) -> MemoryQuantity {
        self.overcommitted(memory)
    }

    fn overcommitted(&self, memory: MemoryQuantity) -> MemoryQuantity {
        if self.memory_overcommit <= 1.0 {
            return memory;
        }
        // in thousandths, so that the product is exact and rounds down
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "1.0 to 100.0, checked when read"
        )]
        let thousandths = (self.memory_overcommit * 1000.0) as u64;
        MemoryQuantity::from_mib(memory.mib().saturating_mul(thousandths) / 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The listing that users read.
    fn documented() -> &'static str {
        let page = include_str!("../docs/config.md");
        page.split("```toml").nth(1).unwrap().split("```").next().unwrap()
    }

    #[test]
    fn the_documented_listing_is_the_default() {
        let mut listed = HostConfig::parse(documented()).unwrap();
        assert_eq!(listed.profiles.remove("small"), Some(Size::default()));
        assert_eq!(listed, HostConfig::default());
        for line in documented().lines().filter(|line| line.contains(" = ") && !line.starts_with('#')) {
            let key = line.split(" = ").next().unwrap();
            let without = documented().replace(line, "");
            assert!(HostConfig::parse(&without).is_ok(), "{key} may be left out");
        }
    }

    #[test]
    fn a_profile_takes_numbers_and_texts() {
        let text = "[profiles.small]\nmemory = \"4GiB\"\nthreads = 12.5\ngpu = 0";
        let small = HostConfig::parse(text).unwrap().profiles.remove("small").unwrap();
        assert_eq!(small.threads, Some("12.5".parse().unwrap()));
        assert_eq!(small.gpu, Some("0".parse().unwrap()));
    }

    #[rstest]
    #[case("[policy]\nmemory_overcomit = 2.0", "line 2", "memory_overcomit")]
    #[case("[polcy]", "line 1", "polcy")]
    #[case("[defaults]\nmemory = \"1.5G\"", "memory: \"1.5G\"", "write 1536MiB")]
    #[case("[profiles.small]\nthreds = 5", "line 1", "unknown field `threds`")]
    #[case("[daemon]\nstart = \"sometimes\"", "line 2", "on-demand")]
    #[case("[daemon]\ncompute_mode = \"exclusive\"", "line 2", "nvidia-smi -c EXCLUSIVE_PROCESS")]
    #[case("[container]\ninject = \"cdi\"", "line 2", "let the engine bring the devices")]
    #[case("[container]\ninject = \"yes\"", "line 2", "expected `none` or `cdi`")]
    #[case("[container]\npipe_dir = \"run\"", "line 2", "absolute")]
    #[case("[policy]\nmemory_overcommit = 0.5", "line 2", "between 1.0 and 100.0")]
    #[case("[runtime]\npath = []", "line 2", "at least one")]
    #[case("[policy]\nslices = 0", "line 2", "nonzero")]
    #[case("[gpus]\nmanaged = [\"banana\"]", "line 2", "names no GPU")]
    #[case("[gpus]\nmanged = []", "line 2", "manged")]
    #[case("[policy]\n[policy.gpu.0]\nslizes = 2", "line 3", "slizes")]
    #[case("[policy.gpu.0]\nslices = 0", "line 2", "nonzero")]
    #[case("[policy.gpu.0]\nplacement = \"pack\"", "line 2", "placement")]
    #[case("[policy.gpu.zero]\nslices = 2", "line 1", "\"zero\" names no GPU")]
    #[case("not toml", "line 1", "")]
    fn what_is_not_understood_is_named_with_its_line(
        #[case] text: &str,
        #[case] r#where: &str,
        #[case] what: &str,
    ) {
        let error = HostConfig::parse(text).unwrap_err();
        assert!(error.contains(r#where) && error.contains(what), "{error}");
    }

    #[test]
    fn no_file_is_the_default_and_a_directory_is_an_error() {
        assert_eq!(HostConfig::load(Path::new("/nonexistent/config.toml")).unwrap(), HostConfig::default());
        let error = HostConfig::load(Path::new("/")).unwrap_err().to_string();
        assert!(error.contains("cannot read the configuration /: is a directory"), "{error}");
    }

    #[test]
    fn the_reserve_is_kept_and_overcommit_counts_what_is_left() {
        let card = MemoryQuantity::from_mib(10_512);
        let terms = Policy::default().on(&gpu(0));
        assert_eq!(terms.shareable(card).mib(), 10_000);
        assert_eq!(terms.sliceable(card).mib(), 10_512, "slices are of the whole card");
        assert_eq!(Terms { memory_overcommit: 1.5, ..terms }.shareable(card).mib(), 15_000);
    }

    fn gpu(index: u32) -> Gpu {
        toml::from_str(&format!(
            "index = {index}\nuuid = \"GPU-{index}0000000-1111-2222-3333-444444444444\"\nname = \"L4\"\n\
             memory_mib = 23034\ncompute_capability = \"8.9\"\nsms = 58"
        ))
        .unwrap()
    }

    #[test]
    fn gpus_can_be_set_apart_by_index_uuid_or_its_beginning() {
        let managed = |text: &str| {
            let config = HostConfig::parse(text).unwrap();
            (0..3).filter(|index| config.gpus.manages(&gpu(*index))).collect::<Vec<u32>>()
        };
        assert_eq!(managed(""), [0, 1, 2]);
        assert_eq!(managed("[gpus]\nmanaged = [\"0\", \"GPU-2000\"]"), [0, 2]);
        assert_eq!(managed("[gpus]\nmanaged = [1]"), [1], "an index needs no quotes");
        assert_eq!(managed("[gpus]\nmanaged = []"), [0; 0]);
    }

    #[test]
    fn a_gpus_own_policy_comes_before_the_hosts() {
        let config = HostConfig::parse(
            "[policy]\nslices = 4\nreserve = \"1GiB\"\n[policy.gpu.0]\nslices = 2\n\
             [policy.gpu.GPU-00000000]\nthreads_overcommit = false\n[policy.gpu.GPU-0]\nthreads_overcommit = true\n\
             [policy.gpu.1]\nmemory_overcommit = 2.0\nreserve = \"0\"",
        )
        .unwrap();
        let (first, second, third) =
            (config.policy.on(&gpu(0)), config.policy.on(&gpu(1)), config.policy.on(&gpu(2)));
        assert_eq!((first.slices.get(), first.threads_overcommit, first.reserve.mib()), (2, false, 1024));
        assert_eq!((second.slices.get(), second.shareable(gpu(1).memory).mib()), (4, 46_068));
        assert_eq!((third.slices.get(), third.threads_overcommit), (4, true));
    }
}
