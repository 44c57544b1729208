//! The certificates that a TLS connection trusts.

use std::error::Error as _;
use std::io;
use std::sync::Arc;

use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, TlsCertificates};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore};

use crate::Error;

/// Creates the TLS session for a connection to this host. Without `roots`, the public certificate authorities are
/// trusted.
pub(super) fn session(
    host: &str,
    insecure: bool,
    roots: Option<&Arc<RootCertStore>>,
) -> Result<ClientConnection, RedisError> {
    let invalid = |problem| RedisError::from((ErrorKind::InvalidClientConfig, problem));
    if insecure {
        return Err(invalid("certificates must be verified: remove #insecure from the URL"));
    }
    let roots = roots
        .cloned()
        .unwrap_or_else(|| Arc::new(webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect()));
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let host =
        ServerName::try_from(host.to_owned()).map_err(|_| invalid("the host name is not valid"))?;
    let session = ClientConnection::new(Arc::new(config), host);
    session.map_err(|_| invalid("the TLS session could not be created"))
}

/// The error for certificate authorities that are set without TLS.
pub(super) fn unused() -> Error {
    let problem = "the URL does not use TLS: it must begin with rediss://";
    Error::invalid("ca_certificate", problem)
}

/// Reads the certificate authorities from PEM.
pub(super) fn trusted(pem: &[u8]) -> Result<RootCertStore, Error> {
    read(pem).map_err(|problem| Error::invalid("ca_certificate", problem))
}

/// Returns the connection settings with only these authorities (PEM) trusted.
pub(super) fn trust_only(info: ConnectionInfo, pem: &[u8]) -> Result<ConnectionInfo, Error> {
    if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
        return Ok(info);
    }
    let certificates = TlsCertificates { client_tls: None, root_cert: Some(pem.to_vec()) };
    let client = Client::build_with_tls(info, certificates);
    // `trusted` should have reported every problem. The library's own message does not say which certificate it is.
    let client =
        client.map_err(|_| Error::invalid("ca_certificate", "the certificates cannot be used"))?;
    Ok(client.get_connection_info().clone())
}

/// Returns the authorities, or what is wrong with them. An empty list is an error, because it would trust nobody. The
/// error never repeats the PEM, which may be a private key given by mistake.
fn read(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for (number, certificate) in (1..).zip(CertificateDer::pem_slice_iter(pem)) {
        let certificate = certificate.map_err(|error| match error {
            PemError::MissingSectionEnd { .. } => format!("section {number} has no END line"),
            PemError::Base64Decode(_) => format!("section {number} is not base64"),
            _ => format!("section {number} is not PEM"),
        })?;
        let added = store.add(certificate);
        added.map_err(|_| format!("section {number} is not an X.509 certificate"))?;
    }
    if store.is_empty() {
        return Err("it contains no certificate: expected -----BEGIN CERTIFICATE-----".into());
    }
    Ok(store)
}

/// Returns why the server's certificate was not accepted and what to do about it. `None` if the error has another
/// cause.
pub(super) fn distrust(error: &RedisError) -> Option<String> {
    let source = error.source()?.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>()?;
    let source = source.downcast_ref::<io::Error>()?.get_ref()?;
    let rustls::Error::InvalidCertificate(reason) = source.downcast_ref()? else { return None };
    Some(match reason {
        // `BadSignature` means another authority with the same name.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the server's certificate was issued by an authority that is not trusted: \
             set that authority with ca_certificate"
                .to_owned()
        }
        reason => format!("the server's certificate was rejected: {reason}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_certificate_is_distinguished_from_other_failures() {
        let failed = |error: rustls::Error| {
            RedisError::from(io::Error::new(io::ErrorKind::InvalidData, error))
        };
        let expired = failed(rustls::Error::InvalidCertificate(CertificateError::Expired));
        let why = distrust(&expired).expect("a certificate that is not accepted");
        assert_eq!(why, "the server's certificate was rejected: Expired");
        assert_eq!(distrust(&failed(rustls::Error::DecryptError)), None);
        assert_eq!(distrust(&io::Error::from(io::ErrorKind::ConnectionReset).into()), None);
    }
}
