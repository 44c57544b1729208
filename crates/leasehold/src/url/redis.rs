//! Parses the URLs of Redis deployments.
//!
//! Everything in a URL must be known: a typing error must not lead to another database without notice. No error repeats
//! a part of the URL that may belong to a password.

use std::borrow::Cow;
use std::net::Ipv6Addr;

use percent_encoding::percent_decode_str;

use super::{Deployment, Endpoint, Scheme, SentinelSettings, ServerSettings};

const SERVER: &str =
    "redis://[user[:password]@]host[:port][/database], rediss://… for TLS, or unix:///path";
const CLUSTER: &str = "redis-cluster://[user[:password]@]host[:port][,host[:port]…]";
const SENTINEL: &str = "redis-sentinel://[user[:password]@]host[:port][,host[:port]…]/name of the primary[/database], \
                        with the parameters sentinel_user, sentinel_password and sentinel_tls (yes or no), if the \
                        sentinels need them";

/// What is wrong with a URL.
type Problem = Cow<'static, str>;

const DOES_NOT_PARSE: Problem = Cow::Borrowed("it does not parse");
const LATE_AT: Problem = Cow::Borrowed(
    "there is an @ after the hosts; in a password, write %2F for /, %3F for ? and %23 for #",
);

/// Parses what follows `//` in the URL of a deployment.
pub(super) fn parse(scheme: Scheme, rest: &str) -> Result<Deployment, String> {
    let (parsed, expected) = match scheme {
        Scheme::Server { tls } => (server(false, tls, rest).map(Deployment::Server), SERVER),
        Scheme::Socket => (server(true, false, rest).map(Deployment::Server), SERVER),
        Scheme::Sentinel { tls } => (sentinel(tls, rest).map(Deployment::Sentinel), SENTINEL),
        Scheme::Cluster { tls } => (cluster(tls, rest).map(Deployment::Cluster), CLUSTER),
        Scheme::Memory | Scheme::File => (Err(DOES_NOT_PARSE), SERVER),
    };
    parsed.map_err(|problem| format!("{problem}: expected {expected}"))
}

/// Parses what follows `redis://` or `unix://`.
fn server(is_socket: bool, tls: bool, rest: &str) -> Result<ServerSettings, Problem> {
    let parts = Parts::of(rest, "6379");
    if is_socket {
        parts.check_parameters(&["db", "user", "pass", "protocol"])?;
    } else {
        parts.check(&["db", "protocol"])?;
        parts.check_hosts()?;
    }
    if tls && parts.fragment == Some("insecure") {
        return Err("certificates must be verified: remove #insecure".into());
    }
    parts.check_fragment()?;
    if parts.hosts.len() > 1 {
        let problem = "it has several hosts; a single server has one";
        return Err(format!("{problem}; use redis-cluster:// or redis-sentinel://").into());
    }
    let in_path = Some(parts.path).filter(|path| !is_socket && !path.is_empty());
    let database = match (in_path, parts.parameter("db")) {
        (Some(path), Some(parameter)) if path != parameter => {
            return Err("the path and the parameter db select different databases".into());
        }
        (path, parameter) => path.or(parameter).map_or(Ok(0), database)?,
    };
    // Other programs may choose the version of the protocol in the same URL. We need version 3.
    let known = [None, Some("2"), Some("3"), Some("resp2"), Some("resp3")];
    match &parts.hosts[..] {
        _ if !known.contains(&parts.parameter("protocol")) => Err(DOES_NOT_PARSE),
        _ if is_socket => parts.socket(database),
        [host, ..] => parts.server(*host, tls, database),
        [] => Err(DOES_NOT_PARSE),
    }
}

fn database(text: &str) -> Result<u64, Problem> {
    // It is not repeated: it may be part of a password that contains a slash.
    let database: i64 = text.parse().map_err(|_| "the database is not a number")?;
    let negative = |_| format!("there is no database {database}; the first is 0").into();
    u64::try_from(database).map_err(negative)
}

/// Parses what follows `redis-cluster://`.
fn cluster(tls: bool, rest: &str) -> Result<Vec<ServerSettings>, Problem> {
    let parts = Parts::of(rest, "6379");
    parts.check(&[])?;
    parts.check_fragment()?;
    if !matches!(parts.path, "" | "0") {
        return Err("it selects a database; a cluster has only database 0".into());
    }
    parts.check_hosts()?;
    parts.hosts.iter().map(|host| parts.server(*host, tls, 0)).collect()
}

/// Parses what follows `redis-sentinel://`.
fn sentinel(tls: bool, rest: &str) -> Result<SentinelSettings, Problem> {
    let parts = Parts::of(rest, "26379");
    parts.check(&["sentinel_user", "sentinel_password", "sentinel_tls"])?;
    parts.check_fragment()?;
    let (service, database) = parts.path.split_once('/').unwrap_or((parts.path, "0"));
    if service.is_empty() {
        return Err("the name of the primary is missing".into());
    }
    let database: u32 = database.parse().map_err(|_| "the database is not a number")?;
    parts.check_hosts()?;
    let sentinel_tls = match parts.parameter("sentinel_tls") {
        None => tls,
        Some("yes") => true,
        Some("no") => false,
        Some(other) => {
            return Err(format!("sentinel_tls is {other:?}; it must be yes or no").into());
        }
    };
    let server = parts.server(parts.hosts[0], tls, database.into())?;
    let credential = |name| decoded(parts.parameter(name).unwrap_or_default());
    let (user, password) = (credential("sentinel_user")?, credential("sentinel_password")?);
    let sentinel = |host: &_| {
        let (user, password) = (user.clone(), password.clone());
        Ok(ServerSettings { user, password, ..parts.server(*host, sentinel_tls, 0)? })
    };
    let sentinels = parts.hosts.iter().map(sentinel).collect::<Result<_, Problem>>()?;
    Ok(SentinelSettings { sentinels, service: service.to_owned(), server })
}

/// The parts of `[user[:password]@]host[:port],…[/path][?parameters][#fragment]`.
struct Parts<'a> {
    credentials: &'a str,
    /// The hosts, each with its port.
    hosts: Vec<(&'a str, &'a str)>,
    path: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
    fragment: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(rest: &'a str, default_port: &'static str) -> Self {
        let (rest, fragment) =
            rest.split_once('#').map_or((rest, None), |(rest, after)| (rest, Some(after)));
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let host = |host: &'a str| {
            // A colon inside of brackets belongs to an IPv6 address.
            let port = host.rsplit_once(':').filter(|(_, port)| !port.contains(']'));
            port.unwrap_or((host, default_port))
        };
        let parameters = parameters.split('&').filter(|pair| !pair.is_empty());
        Self {
            credentials,
            hosts: hosts.split(',').filter(|host| !host.is_empty()).map(host).collect(),
            path: path.trim_end_matches('/'),
            parameters: parameters.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect(),
            fragment,
        }
    }

    /// Checks the parameters and the path. An unescaped `/`, `?` or `#` in the password ends the hosts too early. The
    /// text after it may be part of the password, so the message does not repeat it.
    fn check(&self, known: &[&str]) -> Result<(), Problem> {
        if [self.path, self.fragment.unwrap_or_default()].iter().any(|part| part.contains('@')) {
            return Err(LATE_AT);
        }
        self.check_parameters(known)
    }

    fn check_parameters(&self, known: &[&str]) -> Result<(), Problem> {
        if let Some((unknown, _)) = self.parameters.iter().find(|(name, _)| !known.contains(name)) {
            let mut all = self.parameters.iter();
            if all.clone().any(|(name, value)| name.contains('@') || value.contains('@')) {
                return Err(LATE_AT);
            }
            // It may be the rest of a password that contains a `&`.
            if all.any(|(name, _)| known.contains(name) && name.contains("pass")) {
                return Err("a parameter is unknown; write & in a password as %26".into());
            }
            return Err(format!("the parameter {unknown:?} is unknown").into());
        }
        let count = |name: &str| self.parameters.iter().filter(|(known, _)| *known == name).count();
        match known.iter().find(|name| count(name) > 1) {
            Some(twice) => Err(format!("the parameter {twice:?} is given twice").into()),
            None => Ok(()),
        }
    }

    fn check_hosts(&self) -> Result<(), Problem> {
        if self.hosts.is_empty() {
            return Err("it has no host".into());
        }
        let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
        let Some((_, bad)) = self.hosts.iter().find(|(_, port)| !is_port(port)) else {
            return Ok(());
        };
        // What is not a number may be a password without its host.
        let is_number = bad.bytes().all(|byte| byte.is_ascii_digit());
        let bad = if is_number { format!("the port {bad}") } else { "the port".to_owned() };
        Err(format!("{bad} is not a number from 1 to 65535").into())
    }

    fn check_fragment(&self) -> Result<(), Problem> {
        self.fragment.map_or(Ok(()), |_| Err("it must not contain #".into()))
    }

    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.parameters.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Returns the settings of the server at one of the hosts.
    fn server(
        &self,
        (host, port): (&str, &str),
        tls: bool,
        database: u64,
    ) -> Result<ServerSettings, Problem> {
        let (user, password) = self.credentials.split_once(':').unwrap_or((self.credentials, ""));
        let host = valid_host(host).ok_or(DOES_NOT_PARSE)?;
        let endpoint = Endpoint::Tcp { host, port: port.parse().map_err(|_| DOES_NOT_PARSE)?, tls };
        let (user, password) = (decoded(user)?, decoded(password)?);
        Ok(ServerSettings { endpoint, user, password, database })
    }

    /// Returns the settings of the server at a Unix socket.
    fn socket(&self, database: u64) -> Result<ServerSettings, Problem> {
        let is_local = self.hosts.is_empty() && self.credentials.is_empty();
        let path = decoded(self.path)?.filter(|_| is_local).ok_or(DOES_NOT_PARSE)?;
        // Spaces are written as in the parameters of any URL.
        let parameter = |name| decoded(&self.parameter(name).unwrap_or_default().replace('+', " "));
        let endpoint = Endpoint::Unix(format!("/{path}").into());
        let (user, password) = (parameter("user")?, parameter("pass")?);
        Ok(ServerSettings { endpoint, user, password, database })
    }
}

/// Decodes `%2F` and the like. An empty text counts as missing.
fn decoded(text: &str) -> Result<Option<String>, Problem> {
    let text = percent_decode_str(text).decode_utf8().map_err(|_| DOES_NOT_PARSE)?;
    Ok(Some(text.into_owned()).filter(|text| !text.is_empty()))
}

/// Returns the host without the brackets of an IPv6 address. `None` if no server can have this address.
fn valid_host(host: &str) -> Option<String> {
    if let Some(address) = host.strip_prefix('[') {
        let address: Ipv6Addr = address.strip_suffix(']')?.parse().ok()?;
        return (!address.is_unspecified()).then(|| address.to_string());
    }
    let is_forbidden = |c: char| c.is_ascii_control() || " #/:<>?@[\\]^|".contains(c);
    let is_valid = !host.is_empty() && !host.contains(is_forbidden) && host != "0.0.0.0";
    is_valid.then(|| host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::StoreUrl;

    fn deployment(url: &str) -> Deployment {
        match StoreUrl::parse(url) {
            Ok(StoreUrl::Redis(deployment)) => deployment,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn server(url: &str) -> ServerSettings {
        match deployment(url) {
            Deployment::Server(settings) => settings,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn credentials(server: &ServerSettings) -> (Option<&str>, Option<&str>) {
        (server.user.as_deref(), server.password.as_deref())
    }

    fn problem(url: &str) -> String {
        let Err(error) = StoreUrl::parse(url) else { panic!("{url} parses") };
        error.to_string()
    }

    #[test]
    fn sentinels_and_servers_have_credentials_of_their_own() {
        let url = "rediss-sentinel://app:s%40cret@one:1,two,[::1]:3/mymaster/2?sentinel_user=watch&sentinel_password=p%26w&sentinel_tls=no";
        let parsed = deployment(url);
        assert_eq!(parsed.to_string(), "rediss-sentinel://one:1,two:26379,[::1]:3/mymaster/2");
        let Deployment::Sentinel(settings) = parsed else { panic!("no sentinels") };
        assert_eq!(credentials(&settings.server), (Some("app"), Some("s@cret")));
        assert_eq!(settings.server.database, 2);
        assert!(settings.server.uses_tls());
        assert_eq!(credentials(&settings.sentinels[1]), (Some("watch"), Some("p&w")));
        assert_eq!(settings.sentinels[2].host_and_port(), ("::1".to_owned(), 3));
        assert!(!settings.sentinels[0].uses_tls());
    }

    #[test]
    fn a_cluster_is_reached_by_some_of_its_nodes() {
        let parsed = deployment("redis-cluster://:pw@one,two:7000");
        assert_eq!(parsed.to_string(), "redis-cluster://one:6379,two:7000");
        let Deployment::Cluster(nodes) = parsed else { panic!("no cluster") };
        assert_eq!(credentials(&nodes[1]), (None, Some("pw")));
    }

    #[test]
    fn the_missing_part_of_a_url_is_named() {
        assert!(problem("redis-sentinel://one,two").contains("the name of the primary is missing"));
        assert!(problem("redis-sentinel://one/m/x").contains("the database is not a number"));
        assert!(
            problem("redis-sentinel://one/m?tls=1").contains("the parameter \"tls\" is unknown")
        );
        assert!(
            problem("redis-cluster://one/3")
                .contains("it selects a database; a cluster has only database 0")
        );
        assert!(problem("redis-cluster://").contains("it has no host"));
        assert!(!problem("redis-cluster://user:secret@host:99999").contains("secret"));
    }

    #[test]
    fn the_database_is_in_the_path_or_a_parameter() {
        let database = |url: &str| server(url).database;
        assert_eq!(database("redis://host"), 0);
        assert_eq!(database("redis://host?db=1"), 1);
        assert_eq!(database("redis://user:pass@host:1/?db=3&protocol=resp3"), 3);
        assert_eq!(database("rediss://host/2"), 2);
        assert_eq!(database("redis://host/2?db=2"), 2);
        assert_eq!(database("unix:///tmp/a@b.sock?db=4&pass=p@ss"), 4);
        assert_eq!(deployment("redis://host?db=1").to_string(), "redis://host:6379/1");
        assert!(problem("redis://host/2?db=3").contains("select different databases"));
        assert!(problem("redis://host?db=one").contains("the database is not a number"));
        assert!(problem("redis://host?db=1&db=2").contains("\"db\" is given twice"));
        assert!(problem("redis://host/-1").contains("there is no database -1; the first is 0"));
    }

    #[test]
    fn no_part_of_a_password_is_repeated() {
        for url in [
            "redis://:12/HIDDEN@host",
            "redis://user:12/HIDDEN",
            "redis://user%3A12/HIDDEN%40host",
            "redis://user:12/HIDDEN?protocol=3@host",
            "redis-cluster://user:1/HIDDEN",
            "redis-sentinel://host/name/HIDDEN",
            "redis-sentinel://host/name?sentinel_password=ab&HIDDEN",
            "unix:///socket?pass=ab&HIDDEN",
            "redis:HIDDEN@host",
        ] {
            let problem = problem(url);
            assert!(!problem.contains("HIDDEN"), "{url}: {problem}");
        }
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        assert!(problem("redis://host?timeout=5").contains("the parameter \"timeout\" is unknown"));
        assert!(problem("unix:///a?password=x").contains("the parameter \"password\" is unknown"));
        assert!(problem("redis://host?protocol=4").contains("it does not parse"));
        assert!(problem("redis://host#insecure").contains("it must not contain #"));
        assert!(problem("rediss://host#secure").contains("it must not contain #"));
        assert!(problem("rediss://host#insecure").contains("certificates must be verified"));
        assert!(problem("redis-cluster://host#insecure").contains("it must not contain #"));
        assert!(problem("redis://one,two").contains("use redis-cluster:// or redis-sentinel://"));
    }

    #[test]
    fn an_invalid_port_is_named() {
        for url in [
            "redis://a:99999",
            "rediss://u:p@[::1]:99999",
            "redis-cluster://a,b:99999",
            "redis-sentinel://a:99999/m",
        ] {
            let problem = problem(url);
            assert!(
                problem.contains("the port 99999 is not a number from 1 to 65535"),
                "{url}: {problem}"
            );
        }
        assert!(problem("redis://a:0").contains("the port 0 is not"));
        // A password without a host.
        assert!(!problem("redis://joe:secret").contains("secret"));
    }

    #[test]
    fn a_password_that_is_not_encoded_is_not_repeated() {
        for url in [
            "redis-cluster://joe:x/secret@host",
            "redis-cluster://joe:x?secret@host",
            "redis-cluster://joe:x?secret&y=z@host",
            "redis-cluster://joe:a@b/secret@host",
            "redis-sentinel://joe:1/secret@host/mymaster",
            "redis-sentinel://joe:1/secret@host",
            "redis-sentinel://joe:1?secret=2@host/mymaster",
            "redis://joe:x/secret@host",
            "redis://joe:x?secret@host",
            "redis://joe:x#secret@host",
            "redis-cluster://joe:x#secret@host",
        ] {
            let problem = problem(url);
            assert!(!problem.contains("secret"), "{url}: {problem}");
            assert!(
                problem.contains("write %2F for /, %3F for ? and %23 for #"),
                "{url}: {problem}"
            );
        }
        let url = "redis-sentinel://one/mymaster?sentinel_password=p@ss";
        deployment(url);
    }

    #[test]
    fn a_server_has_a_host_or_a_path_and_credentials() {
        let tcp = |host: &str, port, tls| Endpoint::Tcp { host: host.to_owned(), port, tls };
        for (url, endpoint, expected) in [
            ("redis://host", tcp("host", 6379, false), (None, None)),
            ("valkey://joe@10.0.0.1:1", tcp("10.0.0.1", 1, false), (Some("joe"), None)),
            ("rediss://:p%40ss@[::1]", tcp("::1", 6379, true), (None, Some("p@ss"))),
            ("valkeys://j%C3%B6:a:b@host/", tcp("host", 6379, true), (Some("jö"), Some("a:b"))),
            ("redis://:a@b@host", tcp("host", 6379, false), (None, Some("a@b"))),
            ("redis://joe:@host", tcp("host", 6379, false), (Some("joe"), None)),
            ("redis://:a%zz+%25@host", tcp("host", 6379, false), (None, Some("a%zz+%"))),
            (
                "unix:///tmp/a%20b.sock?user=joe&pass=a+b%2Bc",
                Endpoint::Unix("/tmp/a b.sock".into()),
                (Some("joe"), Some("a b+c")),
            ),
            ("redis+unix:///s", Endpoint::Unix("/s".into()), (None, None)),
        ] {
            let server = server(url);
            assert_eq!(server.endpoint, endpoint, "{url}");
            assert_eq!(credentials(&server), expected, "{url}");
            assert!(!format!("{server:?}").contains("a@b"), "{server:?}");
        }
        for url in [
            "redis://ho st",
            "redis://0.0.0.0",
            "redis://[::]:1",
            "redis://[::g]",
            "redis://::1",
            "redis://:%ff@host",
            "unix://host/path",
            "unix://",
        ] {
            assert!(problem(url).contains("it does not parse"), "{url}: {}", problem(url));
        }
    }
}
