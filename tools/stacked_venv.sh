# make_stacked_venv FOLDER: an environment that stands on .venv, which brings infinity and all else. To be sourced, in the checkout.

make_stacked_venv() {
    local venv=$1 sight=() own below
    rm -rf "$venv"
    grep -qi 'system-site-packages *= *true' .venv/pyvenv.cfg && sight=(--system-site-packages)
    .venv/bin/python -m venv --without-pip "${sight[@]}" "$venv"
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    below=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$below')" >"$own/infinity-below.pth"
}
