from gradshare.cli import main

main()
